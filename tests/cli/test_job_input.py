"""A job's input is checked before anything is started."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from contracts.error import BadInputError, LimitExceededError
from contracts.limit import MAX_INPUT_BYTES
from muster.job_input import read_input


def read(argument: str, stdin: bytes = b"") -> str:
    """Read an input as the command line gives it."""
    return read_input(argument, io.BytesIO(stdin))


def test_input_comes_from_the_argument_a_file_or_standard_input(tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    path.write_text("from a file — ünï\n")
    assert read("Berlin") == "Berlin"
    assert read(f"@{path}") == "from a file — ünï\n"
    assert read("-", b"from a pipe") == "from a pipe"


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_empty_input_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="the input is empty") as caught:
        read(text)
    assert caught.value.hint
    with pytest.raises(BadInputError, match="the input is empty"):
        read("-", text.encode())


def test_five_megabytes_are_refused_with_size_and_limit(tmp_path: Path) -> None:
    with pytest.raises(LimitExceededError, match="5,000,000 bytes, the limit is 1,000,000 bytes"):
        read("x" * 5_000_000)
    path = tmp_path / "big.txt"
    path.write_bytes(b"x" * 5_000_000)
    with pytest.raises(LimitExceededError, match="5,000,000 bytes, the limit is 1,000,000 bytes"):
        read(f"@{path}")
    with pytest.raises(BadInputError, match="more than the limit of 1,000,000 bytes"):
        read("-", b"x" * 5_000_000)


def test_limit_counts_bytes_not_characters() -> None:
    assert read("x" * MAX_INPUT_BYTES)
    with pytest.raises(LimitExceededError):
        read("ü" * (MAX_INPUT_BYTES // 2 + 1))


def test_endless_standard_input_is_not_read_to_its_end() -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            assert 0 < size <= MAX_INPUT_BYTES + 1
            return b"y" * size

    with pytest.raises(BadInputError, match="more than the limit"):
        read_input("-", Endless())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "says"),
    [("a\udcffb", "not valid Unicode at character 2"), ("ab\0", "NUL character at character 3")],
)
def test_text_that_cannot_be_stored_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadInputError, match=says) as caught:
        read(text)
    assert caught.value.hint
    assert caught.value.message.isprintable()


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(b"ab\xff\xd8")
    with pytest.raises(BadInputError, match="not UTF-8 text: byte 3 is 0xff"):
        read(f"@{path}")


@pytest.mark.parametrize("name", ["missing.txt", "", "a\0b"])
def test_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read(f"@{tmp_path / name}")
    assert caught.value.hint
