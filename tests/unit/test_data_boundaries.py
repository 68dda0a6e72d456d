"""Which tokens are learnt: those that hold characters of the answer, seen from the whole text."""

from copy import copy
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import KINDS, tokenizer

from openrlhf.data.boundaries import Encoder, MarkedText, tokens_in, with_images
from openrlhf.data.files import DataError

TEXTS = st.text(st.sampled_from("ab c=A:.\n é日</s>the"), min_size=1, max_size=20)


@cache
def encoder(kind):
    return Encoder(tokenizer(kind), max_len=1000)


def encode(text, spans, *, kind="byte_level", max_len=1000):
    limited = copy(encoder(kind))
    limited.max_len = max_len
    (tokens,) = limited.encode([MarkedText.of(text, spans)])
    return tokens


def answered(prompt, response, **options):
    return encode(prompt + response, [(len(prompt), len(prompt + response))], **options)


def pieces(kind, ids):
    return encoder(kind).tokenizer.convert_ids_to_tokens([int(i) for i in ids])


class Counting:
    """A tokenizer that knows the longest text it was given."""

    def __init__(self, tokenizer):
        self._tokenizer, self.longest = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, texts, **options):
        self.longest = max(self.longest, *map(len, texts))
        return self._tokenizer(texts, **options)


def test_of_a_huge_text_no_more_than_may_be_kept_is_tokenised(monkeypatch):
    """The tokens are those of the whole text, of which 20 are kept; only what is tokenised is less."""
    text = "Q: what is a cat? " * 400
    whole = answered(text[:9], text[9:], max_len=20)
    monkeypatch.setattr("openrlhf.data.boundaries.HUGE", 100)
    limited = copy(encoder("byte_level"))
    limited.max_len, limited.tokenizer = 20, Counting(limited.tokenizer)
    (tokens,) = limited.encode([MarkedText.of(text, [(9, len(text))])])
    assert limited.tokenizer.longest < 1000
    assert (tokens.ids.tolist(), tokens.targets.tolist()) == (whole.ids.tolist(), whole.targets.tolist())
    assert tokens.truncated
    assert whole.truncated


class TestOffsets:
    def test_any_character_counts(self):
        """Span 2:4. Token (1, 3) straddles its beginning, (3, 5) its end; (0, 2) and (4, 6) only touch it."""
        offsets = [(0, 2), (1, 3), (3, 5), (4, 6)]
        assert tokens_in([(2, 4)], offsets).tolist() == [False, True, True, False]

    def test_a_token_without_characters_counts_by_its_place(self):
        assert tokens_in([(2, 4)], [(1, 1), (2, 2), (3, 3), (4, 4)]).tolist() == [False, True, True, False]

    def test_no_tokens(self):
        assert tokens_in([(0, 1)], []).tolist() == []


class TestBoundary:
    def test_a_merge_across_the_boundary_is_learnt(self):
        """`Q:` ends in a space; the answer `the` makes the token `Ġthe` with it. Tokenised apart it would not exist."""
        prompt, response = "A: ", "the"
        tokens = answered(prompt, response)
        assert pieces("byte_level", tokens.ids[tokens.targets]) == ["Ġthe", "</s>"]
        assert len(tokenizer()(prompt)["input_ids"]) == tokens.prompt_length + 1

    def test_spaces_are_told_apart_though_the_tokenizer_trims_offsets(self):
        """Two spaces of the prompt, one of the answer. The tokenizer's own offset of `ĠĠ` is (3, 3): the answer's place."""
        tokens = answered("a  ", " =")
        assert pieces("byte_level", tokens.ids[:2]) == ["a", "ĠĠ"]
        assert tokenizer()("a   =", return_offsets_mapping=True)["offset_mapping"][1] == (3, 3)
        assert tokenizer().decode(tokens.ids[tokens.targets]) == " =</s>"

    def test_trailing_spaces_of_the_answer_are_learnt(self):
        tokens = answered("a", "b   ")
        assert tokenizer().decode(tokens.ids[tokens.targets]) == "b   </s>"

    def test_a_character_of_several_byte_tokens(self):
        """`é` of the prompt and `日` of the answer are two and three tokens."""
        tokens = answered("é", "日")
        assert tokens.targets.tolist() == [False, False, True, True, True, True]

    def test_the_first_token_is_never_learnt(self):
        """`2+3` is learnt as a whole: nothing predicts its first token."""
        tokens = encode("the cat", [(0, 7)])
        assert tokens.targets[0] == np.False_
        assert tokens.targets[1:].all()


class TestAnyTokenizer:
    @pytest.mark.parametrize("kind", KINDS)
    @given(prompt=TEXTS, response=TEXTS)
    def test_targets_are_the_answer_and_at_most_what_a_straddling_token_adds(self, kind, prompt, response):
        """Token i stands at characters [s, e). Before the first target all characters are the prompt's; from it on,
        each token has one of the answer's. The ids are those of the whole text, whatever is learnt."""
        prompt = "x" + prompt
        tokens = answered(prompt, response, kind=kind)
        made = encoder(kind).tokenizer
        text = (prompt + response).rstrip("\n")
        plain = made(text, add_special_tokens=False)["input_ids"]
        assert tokens.ids[: len(plain)].tolist() == plain
        boundary = min(len(prompt), len(text))
        offsets = made(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        for i, (start, end) in enumerate(offsets):
            if i == 0:
                assert not tokens.targets[0]
            elif tokens.targets[i]:
                assert end > boundary
            else:
                assert end <= boundary or start == end
        closed = boundary < len(text)
        assert (len(tokens.ids) > len(plain)) == (closed and plain[-1] != made.eos_token_id)

    @pytest.mark.parametrize("kind", ["bpe", "byte_level"])
    @given(prompt=TEXTS, response=TEXTS)
    def test_targets_decode_to_the_answer(self, kind, prompt, response):
        """Where the boundary is one of tokens too, nothing is added to the answer and nothing lost."""
        prompt, response = f"x{prompt}<|end|>", response.strip("\n") + "."
        tokens = answered(prompt, response, kind=kind)
        made = encoder(kind).tokenizer
        learnt = made.decode(tokens.ids[tokens.targets], clean_up_tokenization_spaces=False)
        if kind == "bpe":
            learnt = "".join(made.convert_ids_to_tokens(tokens.ids[tokens.targets].tolist()))
            response = response.replace("é", "<unk>").replace("日", "<unk>")
        assert learnt == response + "</s>"

    @pytest.mark.parametrize("kind", KINDS)
    @given(response=TEXTS, max_len=st.integers(1, 30))
    def test_truncation_only_cuts(self, kind, response, max_len):
        """A cut text is the beginning of the whole one: no end-of-sequence is put at its end."""
        whole = answered("Q: ", response + ".", kind=kind)
        cut = answered("Q: ", response + ".", kind=kind, max_len=max_len)
        assert cut.ids.tolist() == whole.ids[:max_len].tolist()
        assert cut.targets.tolist() == whole.targets[:max_len].tolist()
        assert cut.truncated == (len(whole.ids) > max_len)
        assert cut.prompt_length == whole.prompt_length


class TestEndOfSequence:
    def test_it_is_added_without_a_space(self):
        tokens = answered("a", "b")
        assert tokenizer().decode(tokens.ids) == "ab</s>"

    def test_it_is_not_added_twice(self):
        tokens = answered("a", "b</s>")
        assert tokenizer().decode(tokens.ids) == "ab</s>"
        assert tokens.targets[-1]

    def test_newlines_before_it_go(self):
        assert tokenizer().decode(answered("a", "b\n\n").ids) == "ab</s>"
        assert tokenizer().decode(answered("a", "b</s>\n").ids) == "ab</s>"

    def test_it_does_not_follow_words_that_are_not_the_models(self):
        """The user has the last word: there is no end to learn."""
        assert tokenizer().decode(encode("abc", [(1, 2)]).ids) == "abc"

    def test_a_text_that_fits_only_without_it_is_cut(self):
        """`a b` is 2 tokens; with the end 3."""
        assert tokenizer().decode(answered("a", " b", max_len=2).ids) == "a b"
        assert answered("a", " b", max_len=2).truncated
        assert not answered("a", " b", max_len=3).truncated


class TestSlowTokenizers:
    class Slow:
        """One token per character, no offsets."""

        is_fast, eos_token_id = False, 1

        def __call__(self, texts, *, return_offsets_mapping, **_):
            assert not return_offsets_mapping
            return {"input_ids": [[ord(c) for c in text] for text in texts]}

    def test_whole_texts_need_no_offsets(self):
        (tokens,) = Encoder(self.Slow(), max_len=9).encode([MarkedText("ab", None, closed=True)])
        assert tokens.ids.tolist() == [97, 98, 1]

    def test_a_boundary_is_refused(self):
        with pytest.raises(DataError, match=r"leave --data\.disable_fast_tokenizer out"):
            Encoder(self.Slow(), max_len=9).encode([MarkedText.of("ab", [(1, 2)])])


def test_the_tokenizer_itself_is_left_as_it_was():
    made = tokenizer()
    before = made("a  b", return_offsets_mapping=True)["offset_mapping"]
    Encoder(made, max_len=9)
    assert made("a  b", return_offsets_mapping=True)["offset_mapping"] == before


def test_images_take_the_places_of_their_tokens():
    """9 stands for an image. Of what is around images the target stays what it was; that of images is never learnt."""
    ids, targets = np.array([1, 9, 2, 9, 9, 3]), np.array([False, True, True, True, False, True])
    ids, targets, spans = with_images(ids, targets, [(7, 7, 8), (7,), (7, 8)], image_token_id=9)
    assert ids.tolist() == [1, 7, 7, 8, 2, 7, 7, 8, 3]
    assert targets.tolist() == [False, False, False, False, True, False, False, False, True]
    assert spans == [(1, 4), (5, 6), (6, 8)]


def test_images_count_with_all_their_tokens():
    """The prompt "a<|start|>" and the answer "b", </s>: with an image of four tokens for <|start|> five and two."""
    tokenizer_ = tokenizer()
    limited = Encoder(tokenizer_, max_len=6, image_token="<|start|>")
    text = MarkedText.of("a<|start|>b", [(10, 11)])
    (tokens,) = limited.encode([text], [[(5, 5, 5, 5)]])
    assert tokens.ids.tolist() == [
        tokenizer_.convert_tokens_to_ids("a"),
        5,
        5,
        5,
        5,
        tokenizer_.convert_tokens_to_ids("b"),
    ]
    assert (tokens.prompt_length, tokens.truncated, tokens.images) == (5, True, ((1, 5),))
    assert tokens.targets.tolist() == [False] * 5 + [True]
