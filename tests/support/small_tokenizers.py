"""Tokenizers of the kinds that models have, trained on a few lines."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["</s>", "<unk>", "<|start|>", "<|end|>", "<|user|>", "<|assistant|>"]

CORPUS = [
    "Q: what is a cat? A: a cat is an animal.",
    "Q: 2+3= A: the answer is 5.",
    "the answer is a b c d e f g h\n\nthe end \n a  b   c",
    "<think> a plan </think> user: assistant: hello world",
] * 8

KINDS = ("bpe", "byte_level", "unigram", "byte_fallback")


@cache
def trained(kind: str) -> str:
    """The tokenizer's JSON: tests that change one must not change the others'."""
    return _MAKERS[kind]().to_str()


def tokenizer(kind: str = "byte_level", *, chat_template: str | None = None, eos: str = "</s>"):
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained(kind)),
        eos_token=eos,
        unk_token="<unk>",
        additional_special_tokens=["<|start|>", "<|end|>"],
    )
    made.chat_template = chat_template
    return made


def _bpe() -> Tokenizer:
    """Merges over everything, spaces and punctuation included: whatever can merge across a boundary does."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False))
    return made


def _byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: a space joins the word after it, and offsets are trimmed of it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return made


def _unigram() -> Tokenizer:
    """As SentencePiece: spaces become ▁, one is put before the text and after special tokens."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False),
    )
    return made


def _byte_fallback() -> Tokenizer:
    """As Llama 2: characters that are not in the vocabulary are spelt in bytes; a normalizer puts ▁ for spaces."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=[*SPECIAL, *bytes_], show_progress=False)
    )
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return made


_MAKERS = {"bpe": _bpe, "byte_level": _byte_level, "unigram": _unigram, "byte_fallback": _byte_fallback}
