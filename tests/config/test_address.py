"""An address is parsed once, printed as it was written, and refused with what is wrong, without a secret of it."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_lite.config.address import Address, is_address, parse_address
from torchtitan_lite.errors import ConfigError

NAMES = st.text(st.sampled_from("abzABZ019!_.,'()=+@-"), min_size=1, max_size=9).filter(lambda n: n not in (".", ".."))


@given(st.sampled_from(["s3", "gs", "az"]), st.lists(NAMES, min_size=1, max_size=4), st.sampled_from(["", "/"]))
def test_an_address_is_printed_as_it_was_written(scheme: str, names: list[str], slash: str) -> None:
    text = f"{scheme}://my-bucket.1/" + "/".join(names)
    address = parse_address(text + slash)
    assert address == Address(scheme, "my-bucket.1", "/".join(names))
    assert str(address) == text
    assert pickle.loads(pickle.dumps(address)) == address


def test_only_what_begins_with_a_scheme_is_meant_as_an_address() -> None:
    assert all(
        map(is_address, ["s3://bucket/run", "gs://b/r", "az://b/r", "s3:///run", "http://host/run", "s3a://b/r"])
    )
    assert not any(
        map(is_address, ["outputs/checkpoint", "/data/run", "./s3://bucket", "s3:/bucket/run", "a b://c", ""])
    )


@pytest.mark.parametrize(
    "text",
    [
        *("http://host/run", "file:///data/run", "hdfs://host/run", "S3://bucket/run", "outputs/checkpoint"),
        *("s3://", "s3:///run", "s3://bücket/run", "s3://bucket", "s3://bucket/"),
        *("s3://bucket/run/../other", "s3://bucket/./run", "s3://bucket//run", "s3://bucket/run//"),
        *("s3://bucket/my run", "s3://bucket/run%2F", "s3://bucket/run\n"),
    ],
)
def test_what_is_no_address_is_refused_in_one_sentence(text: str) -> None:
    expected = (
        r"is not the address of a folder .* expected s3:// \(Amazon S3 .* a bucket of letters, .* s3://bucket/run\.$"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(repr(text))} {expected}"):
        parse_address(text)


@pytest.mark.parametrize("end", ["?x=1", "#f"])
def test_what_follows_an_address_is_said_and_not_shown(end: str) -> None:
    with pytest.raises(ConfigError, match=r"^'s3://bucket/run' is followed by '\?' or '#', which no address"):
        parse_address(f"s3://bucket/run{end}")


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIA:5ecret@bucket/run",
        "s3://AKIA:5ecret/with/slashes@bucket/run",
        "s3://5ecret@bucket/run",
        "https://user:5ecret@host/bucket/run",
        "https://host/bucket/run?X-Amz-Signature=5ecret",
        "s3://bucket/run?X-Amz-Signature=5ecret",
        "s3://bucket/run#5ecret",
    ],
)
def test_a_secret_in_an_address_is_not_printed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert "5ecret" not in str(caught.value)
