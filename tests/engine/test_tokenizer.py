"""What the service relies on in a tokenizer and its chat template."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from contracts.error import BadInputError
from inference_service.engine.byte_tokenizer import ByteTokenizer
from inference_service.engine.protocol import ChatTokenizer
from inference_service.engine.tokenizer import TransformersTokenizer

pytestmark = pytest.mark.timeout(600)  # the model may have to be converted first

CONVERSATION = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": "Grüße aus Tōkyō 🗼 — and Japan?"},
    {"role": "assistant", "content": "Tokyo"},
]


@pytest.fixture(
    scope="session",
    params=["bytes", pytest.param("smollm2", marks=pytest.mark.slow)],
)
def tokenizer(request: pytest.FixtureRequest) -> ChatTokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    return load(request.getfixturevalue("model_files").path)


def load(path: Path) -> TransformersTokenizer:
    """Load a tokenizer, past the warnings that importing its libraries gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformersTokenizer(path)


def test_text_survives_encoding(tokenizer: ChatTokenizer) -> None:
    text = "Grüße, 世界! 🗼\n\tdef f(x): return x ** 2  # <b>"
    assert tokenizer.decode(tokenizer.encode(text, split_special=True)) == text


def test_control_text_is_inert_when_split(tokenizer: ChatTokenizer) -> None:
    assert "<|im_end|>" in tokenizer.special_tokens
    for control in tokenizer.special_tokens:
        text = f"before {control}\n{control}{control} after"
        split = tokenizer.encode(text, split_special=True)
        assert tokenizer.decode(split) == text
        assert tokenizer.eos_token_id not in split


def test_control_text_becomes_one_id_when_not_split(tokenizer: ChatTokenizer) -> None:
    ids = [tokenizer.encode(text, split_special=False) for text in tokenizer.special_tokens]
    assert all(len(each) == 1 for each in ids)
    assert [tokenizer.eos_token_id] in ids


def test_splitting_changes_nothing_in_text_without_control_tokens(
    tokenizer: ChatTokenizer,
) -> None:
    text = "ordinary < text | with > some of im_end their parts"
    split, unsplit = (tokenizer.encode(text, split_special=split) for split in (True, False))
    assert split == unsplit


def test_rendering_a_conversation_begins_with_the_rendering_of_its_beginning(
    tokenizer: ChatTokenizer,
) -> None:
    whole = tokenizer.render(CONVERSATION, add_generation_prompt=False)
    for length in range(1, len(CONVERSATION) + 1):
        start = tokenizer.render(CONVERSATION[:length], add_generation_prompt=False)
        assert whole.startswith(start)


def test_generation_prompt_is_followed_by_what_the_assistant_says(tokenizer: ChatTokenizer) -> None:
    asked = tokenizer.render(CONVERSATION[:2], add_generation_prompt=True)
    answered = tokenizer.render(CONVERSATION[:3], add_generation_prompt=False)
    assert answered.startswith(f"{asked}Paris")


def test_end_of_turn_follows_the_assistants_words(tokenizer: ChatTokenizer) -> None:
    rendered = tokenizer.render(CONVERSATION[:3], add_generation_prompt=False)
    after = rendered[rendered.rindex("Paris") + len("Paris") :]
    assert tokenizer.encode(after, split_special=False)[0] == tokenizer.eos_token_id


def test_digest_is_stable(tokenizer: ChatTokenizer) -> None:
    assert len(tokenizer.digest) == 64
    if isinstance(tokenizer, ByteTokenizer):
        assert tokenizer.digest == ByteTokenizer().digest


@pytest.mark.slow
def test_digest_changes_with_the_template(tmp_path: Path, model_path: Path) -> None:
    for file in model_path.iterdir():
        if file.suffix in (".json", ".jinja"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    same = load(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text().replace("helpful", "terse"))
    assert same.digest == load(model_path).digest
    assert load(tmp_path).digest != same.digest


@pytest.mark.slow
def test_template_that_refuses_a_conversation_says_why(tmp_path: Path, model_path: Path) -> None:
    for file in model_path.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('no system message, please') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(BadInputError, match=r"no system message, please.*'system', 'user'"):
        load(tmp_path).render(CONVERSATION[:2], add_generation_prompt=True)


@pytest.mark.slow
def test_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="does not load"):
        load(tmp_path)


@pytest.mark.slow
def test_model_without_a_chat_template_is_refused(tmp_path: Path, model_path: Path) -> None:
    for file in model_path.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(BadInputError, match="no chat template"):
        load(tmp_path)


@pytest.fixture
def model_path(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue("model_files").path
    return path
