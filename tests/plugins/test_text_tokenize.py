from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsx.errors import DsxError
from dsx_text import files
from dsx_text.tokenize import load_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="the extra `hf` is not installed")

TEXT = "The quick brown fox jumps over the lazy dog.\nÄrger über 東京 🦊, and again the quick fox!\n" * 40


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A byte-level BPE with the settings of a model of single sentences."""
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE())
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    encoder.train_from_iterator([TEXT], trainer)
    encoder.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    encoder.enable_truncation(8)
    encoder.enable_padding(length=512)
    (tmp_path / "tokenizer").mkdir()
    encoder.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    return tmp_path / "tokenizer"


def test_a_trained_tokenizer_makes_16_bit_windows_that_decode_to_the_text(tmp_path: Path, trained: Path) -> None:
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    options: dict[str, Any] = {"context": 16, "held_out": 0, "cache": str(tmp_path / "cache")}
    windows = files(str(tmp_path / "text"), tokenizer=str(trained), **options)
    assert windows.vocab == 300
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".uint16"]
    ids = [int(t) for window in windows for t in window["input_ids"]]
    text = windows.decode(ids).rstrip("\ufffd")  # the last window may end inside a character
    assert TEXT.startswith(text)
    assert len(ids) > windows.tokens - 17
    assert windows.tokens < len(TEXT.encode()) / 1.5
    assert 0 not in ids
    again = files(str(tmp_path / "text"), tokenizer=str(trained / "tokenizer.json"), **options)
    assert again.tokens == windows.tokens
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_characters_cut_by_a_piece_are_whole_and_invalid_ones_replaced(trained: Path) -> None:
    tokenizer = load_tokenizer(str(trained))
    raw = "東京🦊".encode()
    pieces = [raw[:1], raw[1:5], raw[5:8], raw[8:], b"\xff!"]
    assert tokenizer.decode([int(t) for ids in tokenizer.encode(pieces) for t in ids]) == "東京🦊\ufffd!"
    assert tokenizer.decode([int(t) for ids in tokenizer.encode([raw[:4]]) for t in ids]) == "東\ufffd"


def test_bytes_decode_to_the_text_and_replace_what_is_none() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.vocab == 256
    assert [ids.tolist() for ids in tokenizer.encode([b"ab", b"", b"\xff"])] == [[97, 98], [], [255]]
    assert tokenizer.decode([*"é!".encode(), 255]) == "é!\ufffd"


def test_tokenizers_travel_to_other_processes(trained: Path) -> None:
    tokenizer = load_tokenizer(str(trained))
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.vocab == 300
    assert copy.decode([100, 280]) == tokenizer.decode([100, 280])


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DsxError, match=r"no file .*tokenizer\.json\n  remedy: .*save_pretrained"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"no": "tokenizer"}')
    with pytest.raises(DsxError, match=r"cannot be used(.|\n)*not what the tokenizers library reads"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(DsxError, match=r"cannot be used(.|\n)*utf-8"):
        load_tokenizer(str(tmp_path / "binary"))
    (tmp_path / "empty.json").write_text(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    with pytest.raises(DsxError, match="an empty vocabulary"):
        load_tokenizer(str(tmp_path / "empty.json"))


def test_a_missing_library_says_how_to_get_it(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DsxError, match=r"not installed\n  remedy: pip install dsx-engine\[hf\]"):
        load_tokenizer(str(trained))


def test_importing_the_package_is_cheap() -> None:
    heavy = "{'tokenizers', 'transformers', 'torch._dynamo', 'torch.optim.adamw', 'triton'}"
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import torch, sys; before = set(sys.modules); import dsx_text; "
            f"print(({heavy} & sys.modules.keys()) - before)",
        ],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path)},
    )
    assert found.stdout == "set()\n"
