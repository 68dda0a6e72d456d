"""A model of 360,000 weights that has watched others play TextArena's Nim at random, for a short while.

    python examples/worlds/tiny_player.py runs/nim/player

It knows what a move looks like, and hardly which moves are legal, let alone good: docs/worlds_textarena.md has it learn
both by self-play.
"""

import argparse
import random
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, EOS = "<pad>", "<eos>"
PILES, LARGEST = 3, 3
MOVES = [f"[{pile} {quantity}]" for pile in range(PILES) for quantity in range(1, LARGEST + 1)]
WORDS = [
    "Current Pile:\n",
    *(f"  pile {pile}: " for pile in range(PILES)),
    "Player ",
    " attempted an invalid move. Reason: ",
]
WORDS += ["No valid move format found. Use '[pile quantity]'.", "Cannot remove ", " from pile ", " left)."]
WORDS += [" Please resubmit a valid move and remember to follow the game rules to avoid penalties.\n"]
"""What the game says again and again is one token each; the rest is read letter by letter."""
STEPS, BATCH, LEARNING_RATE = 80, 32, 2e-3
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{{ '<eos>' if message.role == 'assistant' else '\n' }}"
    "{% endfor %}"
)


def make_tokenizer() -> Qwen2Tokenizer:
    """A token for each letter, each of these words and each move."""
    letters = [*"\u010a\u0120", *(chr(code) for code in range(33, 127))]  # the first two are a new line and a space
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *letters])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=PAD, pad_token=PAD, eos_token=EOS, chat_template=TEMPLATE
    )
    tokenizer.add_tokens([*MOVES, *WORDS])
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, *, seed: int) -> Qwen2ForCausalLM:
    """Random weights."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def random_game(rng: random.Random) -> list[tuple[list[int], str]]:
    """Positions and moves of two who move at random."""
    piles = [rng.randint(0, LARGEST) for _ in range(PILES)]
    moves = []
    while any(piles):
        pile = rng.choice([i for i, size in enumerate(piles) if size])
        quantity = rng.randint(1, piles[pile])
        moves.append((list(piles), f"[{pile} {quantity}]"))
        piles[pile] -= quantity
    return moves


def imitate(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, *, seed: int) -> None:
    """Learn what such players say at their turns."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        rows, masks = [], []
        for moves in filter(None, (random_game(rng) for _ in range(BATCH))):
            ids, mask = [], []
            for piles, move in moves[rng.randrange(2) :: 2]:
                board = "Current Pile:\n" + "".join(f"  pile {i}: {size}\n" for i, size in enumerate(piles))
                read, said = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (board, move + EOS))
                ids += read + said
                mask += [-100] * len(read) + said
            rows.append(ids)
            masks.append(mask)
        longest = max(map(len, rows))
        ids_NT = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        labels_NT = torch.tensor([mask + [-100] * (longest - len(mask)) for mask in masks])
        model(input_ids=ids_NT, labels=labels_NT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model goes")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=given.seed)
    imitate(model, tokenizer, seed=given.seed)
    model.save_pretrained(given.folder)
    tokenizer.save_pretrained(given.folder)


if __name__ == "__main__":
    main()
