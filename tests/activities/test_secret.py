"""Secrets stand in for their references only where a call is made, and in no text after it."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from urllib.parse import quote

import pytest

from activities.secret import MAX_SECRET_BYTES, Secrets
from contracts.error import BadInputError


def test_references_are_replaced_by_what_they_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "opal/7 31")
    key = tmp_path / "key"
    key.write_text("sapphire-9\n", encoding="utf-8")
    secrets = Secrets()
    text = secrets.reveal("shop", f"Bearer ${{env:SHOP_TOKEN}} and ${{file:{key}}}, not $HOME")
    assert text == "Bearer opal/7 31 and sapphire-9, not $HOME"


def test_values_are_taken_out_of_texts_however_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    value = 'opal/7 "31" é'
    monkeypatch.setenv("SHOP_TOKEN", value)
    secrets = Secrets()
    secrets.reveal("shop", "${env:SHOP_TOKEN}")
    for shown in (value, json.dumps(value), quote(value, safe=""), f"GET /?key={quote(value)}"):
        assert "opal" not in secrets.scrub(f"before {shown} after")
    assert secrets.scrub("nothing to hide") == "nothing to hide"


KEY = "c0balt+9/'x' &"


@pytest.mark.parametrize(
    "shown",
    [
        KEY.encode().hex(),
        KEY.encode().hex().upper(),
        repr(KEY + '"'),
        quote(KEY, safe="").lower(),
        html.escape(KEY),
        *(base64.b64encode(before + KEY.encode() + b"?").decode() for before in (b"", b"u", b"u:")),
        *(
            base64.urlsafe_b64encode(before + KEY.encode()).decode()
            for before in (b"", b"u", b"x:")
        ),
    ],
)
def test_values_are_taken_out_of_digits_escapes_and_longer_base64(
    monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    """Of base64, at most the characters that also hold bits of what is beside it stay."""
    monkeypatch.setenv("SHOP_TOKEN", KEY)
    secrets = Secrets()
    secrets.reveal("shop", "${env:SHOP_TOKEN}")
    found = secrets.scrub(f"<{shown}>")
    assert "[secret]" in found
    assert len(found) <= len("<[secret]>") + 8


def test_long_lines_of_a_value_are_taken_out_one_by_one(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    first, second = "MIIEvQIBADANBgkqhkiG", "9w0BAQEFAASCBKcwggSj"
    key.write_text(f"-----BEGIN KEY-----\n{first}\n{second}\n-----END KEY-----\n")
    secrets = Secrets()
    whole = secrets.reveal("shop", f"${{file:{key}}}")
    assert secrets.scrub(f"line 2: {second}") == "line 2: [secret]"
    assert secrets.scrub(whole) == "[secret]"
    assert secrets.scrub("-----BEGIN KEY-----") == "-----BEGIN KEY-----"


def test_short_values_garble_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_PIN", "123")
    secrets = Secrets()
    secrets.reveal("shop", "${env:SHOP_PIN}")
    assert secrets.scrub("1234 MTIz 313233") == "1234 MTIz 313233"


def test_a_changed_secret_is_read_anew_and_the_old_one_stays_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secrets = Secrets()
    monkeypatch.setenv("SHOP_TOKEN", "first-value")
    secrets.reveal("shop", "${env:SHOP_TOKEN}")
    monkeypatch.setenv("SHOP_TOKEN", "second-value")
    assert secrets.reveal("shop", "${env:SHOP_TOKEN}") == "second-value"
    assert "value" not in secrets.scrub("first-value second-value")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("${env:NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE"),
        ("${env:MUSTER_DATABASE_URL}", "the stack's own"),
        ("${file:relative/key}", "not absolute"),
        ("${file:/no/such/key}", "names no file"),
    ],
)
def test_a_reference_that_leads_nowhere_is_one_clear_error(text: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said) as caught:
        Secrets().reveal("shop", text)
    assert "'shop'" in str(caught.value)
    assert caught.value.hint


def test_a_file_that_is_no_secret_is_refused(tmp_path: Path) -> None:
    large, empty, binary = tmp_path / "large", tmp_path / "empty", tmp_path / "binary"
    large.write_bytes(b"x" * (MAX_SECRET_BYTES + 1))
    empty.touch()
    binary.write_bytes(b"\xff\xfe\x00")
    for path, said in ((large, "limit"), (empty, "empty"), (binary, "cannot be read")):
        with pytest.raises(BadInputError, match=said):
            Secrets().reveal("shop", f"${{file:{path}}}")
