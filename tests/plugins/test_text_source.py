from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.errors import DsxError
from dsx_text import files, gpt
from dsx_text.source import Windows


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Files whose bytes count up from 0 in the order of their paths: 0..99 in a.txt, 100..199 in b/c.txt."""
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "c.txt").write_bytes(bytes(range(100, 200)))
    (folder / "a.txt").write_bytes(bytes(range(100)))
    (folder / ".hidden").write_bytes(b"never")
    (folder / "note.md").write_bytes(b"")
    return folder


def token_ids(windows: Windows) -> list[int]:
    """Every token that the windows hold, inputs and labels."""
    return sorted({int(t) for window in windows for t in torch.cat((window["input_ids"], window["labels"]))})


def test_windows_cut_the_corpus_end_to_end(corpus: Path) -> None:
    windows = files(str(corpus), context=8, held_out=0)
    assert (windows.vocab, windows.tokens, windows.context, windows.held_out) == (256, 200, 8, None)
    assert len(windows) == 24
    for index, window in enumerate(windows):
        assert window["input_ids"].tolist() == list(range(8 * index, 8 * index + 8))
        assert window["labels"].tolist() == list(range(8 * index + 1, 8 * index + 9))
        assert window["input_ids"].dtype is window["labels"].dtype is torch.int64
    assert windows[-1]["labels"].tolist() == windows[23]["labels"].tolist()
    with pytest.raises(IndexError):
        windows[24]


@pytest.mark.parametrize("exact", [17, 18])
def test_a_corpus_of_just_two_windows_has_both(tmp_path: Path, exact: int) -> None:
    (tmp_path / "t").write_bytes(bytes(range(exact)))
    assert len(files(str(tmp_path / "t"), context=8, held_out=0)) == 2


def test_labels_may_be_the_inputs_for_models_that_shift_on_their_own(corpus: Path) -> None:
    window = files(str(corpus), context=8, labels="same")[3]
    assert window["labels"].tolist() == window["input_ids"].tolist() == list(range(24, 32))


@pytest.mark.parametrize("part", [0.001, 0.02, 0.25, 0.5, 0.99])
@pytest.mark.parametrize("context", [1, 7, 8, 64, 98, 99])
def test_no_token_is_both_trained_on_and_held_out(corpus: Path, part: float, context: int) -> None:
    windows = files(str(corpus), context=context, held_out=part)
    held_out = windows.held_out
    assert held_out is not None
    assert held_out.held_out is None
    assert len(held_out) == min(max(1, round(198 // context * part)), 198 // context - 1)
    assert len(windows) + len(held_out) == 198 // context
    assert token_ids(windows)[-1] < token_ids(held_out)[0]
    assert windows.tokens + held_out.tokens == 200


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("a.txt", 100), ("**/*.txt", 200), ("b", 100), ("*.txt", 100), ("[ab]*", 100), (".hidden", 5)],
)
def test_files_may_be_a_file_a_folder_or_a_glob(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, count: int
) -> None:
    assert files(str(corpus / pattern), context=2, held_out=0).tokens == count
    monkeypatch.chdir(corpus)
    assert files(pattern, context=2, held_out=0).tokens == count


def test_a_list_of_files_is_read_once_each_in_the_order_of_their_paths(corpus: Path) -> None:
    windows = files([str(corpus / "b"), str(corpus / "*.txt"), str(corpus)], context=199, held_out=0)
    assert windows[0]["input_ids"].tolist() == list(range(199))


def test_the_standard_library_is_at_hand_without_its_tests() -> None:
    windows = files(limit_bytes=20_000, context=64)
    assert windows.held_out is not None
    assert windows.tokens + windows.held_out.tokens == 20_000
    text = windows.decode(windows[0]["input_ids"])
    assert text.isascii()
    assert len(text) == 64
    assert files(limit_bytes=40_000, context=64).tokens > windows.tokens
    with pytest.raises(DsxError, match="at least 1"):
        files(limit_bytes=0)


def test_a_cache_inside_the_data_is_not_taken_for_data(corpus: Path) -> None:
    first = files(str(corpus), context=8, cache=str(corpus / "cache"), held_out=0)
    assert list((corpus / "cache").iterdir())
    for pattern in (str(corpus), str(corpus / "**" / "*")):
        assert files(pattern, context=8, cache=str(corpus / "cache"), held_out=0).tokens == first.tokens


def test_windows_survive_a_trip_to_another_process_without_their_tokens(corpus: Path) -> None:
    (corpus / "large").write_bytes(bytes(5000))
    windows = files(str(corpus), context=8)
    before = windows[5]["labels"].tolist()
    packed = pickle.dumps(windows)
    assert len(packed) < 1000
    assert pickle.loads(packed)[5]["labels"].tolist() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"files": "no/such/*.txt"}, ['files = "no/such/*.txt" matches no file', "looked in", "stdlib"]),
        ({"files": "/no/such/file"}, ['files = "/no/such/file" matches no file']),
        ({"files": []}, ["files = []", "at least one"]),
        ({"context": 0}, ["context = 0", "at least 1"]),
        ({"context": 2.0}, ["context = 2.0", "whole number"]),
        ({"held_out": 1.0}, ["held_out = 1.0", "below 1"]),
        ({"labels": "previous"}, ["labels = 'previous'", '"next" or "same"', "change labels in [data]"]),
        ({"tokenizer": "/no/such"}, ['tokenizer = "/no/such" cannot be used', "no file /no/such", "bytes"]),
    ],
)
def test_arguments_that_do_not_fit_are_named(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DsxError) as caught:
        files(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_one_of_several_patterns_that_matches_nothing_is_named(corpus: Path) -> None:
    with pytest.raises(DsxError, match=r"\*\.rst"):
        files([str(corpus), str(corpus / "*.rst")], context=8)


def test_too_little_text_says_how_much_it_takes(corpus: Path) -> None:
    with pytest.raises(DsxError, match=r"too short: 200 tokens\n(.|\n)*a\.txt(.|\n)*at least 202: .*held out.*= 100"):
        files([str(corpus / "a.txt"), str(corpus / "b")], context=100)
    with pytest.raises(DsxError, match=r"too short: 200 tokens\n(.|\n)*at least 201: one window, of context = 200"):
        files(str(corpus), context=200, held_out=0)
    assert len(files(str(corpus), context=199, held_out=0)) == 1
    assert len(files(str(corpus), context=99)) == 1


def test_a_sample_continues_held_out_text_and_leaves_no_trace(corpus: Path) -> None:
    windows = files(str(corpus), context=40, held_out=0.5)
    torch.manual_seed(0)
    model = gpt(layers=1, width=16, heads=2, context=40, dropout=0.3)
    model.blocks[0].eval()
    state = torch.get_rng_state()
    text = windows.sample(model, tokens=10)
    assert windows.held_out is not None
    prompt = windows.decode(windows.held_out[0]["input_ids"][:32])
    assert text.startswith(prompt[:-1])
    assert len(text) > len(prompt)
    assert text == windows.sample(model, tokens=10) == windows.held_out.sample(model, tokens=10)
    assert text != windows.sample(model, torch.Generator().manual_seed(1), tokens=10)
    assert model.training
    assert not model.blocks[0].training
    assert torch.equal(state, torch.get_rng_state())


def test_a_model_without_generate_has_no_sample(corpus: Path) -> None:
    assert files(str(corpus), context=8).sample(torch.nn.Linear(2, 2)) == ""


def test_a_sample_of_a_hugging_face_model(corpus: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    windows = files(str(corpus), context=40, labels="same")
    state = torch.get_rng_state()
    text = windows.sample(model, tokens=10)
    assert windows.held_out is not None
    assert text.startswith(windows.decode(windows.held_out[0]["input_ids"][:31]))
    assert text == windows.sample(model, tokens=10) != windows.sample(model, torch.Generator().manual_seed(1), 10)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
