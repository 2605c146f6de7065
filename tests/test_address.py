import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.address import Address, advertised, parse_address
from pdlink.errors import AddressError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("[::1]:8998", "::1", 8998),
        ("[2001:db8::1]:9000", "2001:db8::1", 9000),
        ("host:8998", "host", 8998),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("a-b.example.org.:65535", "a-b.example.org.", 65535),
        ("  node7:1 ", "node7", 1),
    ],
)
def test_host_and_port_are_read(text, host, port):
    assert parse_address(text) == Address(host, port)


@pytest.mark.parametrize(
    ("text", "host"), [("::1", "::1"), ("2001:db8::1", "2001:db8::1"), ("host", "host"), ("[::1]", "::1")]
)
def test_a_bare_host_takes_the_default_port_and_is_refused_without_one(text, host):
    assert parse_address(text, default_port=8998) == Address(host, 8998)
    with pytest.raises(AddressError, match="has no port"):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (":8998", "has no host"),
        ("", "has no host"),
        ("host:99999", "99999, which is outside"),
        ("host:65536", "65536, which is outside"),
        ("host:-1", "'-1', which is not a number"),
        ("host:", "'', which is not a number"),
        ("host:80x", "'80x', which is not a number"),
        ("host:\u0668\u0669", "is not a number"),
        ("host:" + "9" * 5000, "outside 0..65535"),
        ("[::1", "opens a bracket that never closes"),
        ("[::1]8998", "after the bracket"),
        ("[host]:1", "not an IPv6 address"),
        ("[127.0.0.1]:1", "not an IPv6 address"),
        ("::1:8998:zz", "not an IPv6 address"),
        ("a b:1", "neither an IP address nor a host name"),
        ("-host:1", "neither an IP address nor a host name"),
        ("http://host:1", "not an IPv6 address"),
    ],
)
def test_text_that_is_no_address_is_refused_with_the_reason(text, why):
    with pytest.raises(AddressError, match=why):
        parse_address(text, default_port=8998)


@given(
    host=st.one_of(
        st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str), st.from_regex(r"\A[a-z0-9]{1,9}(\.[a-z]{1,9})?\Z")
    ),
    port=st.integers(0, 65535),
)
def test_formatting_then_parsing_is_identity(host, port):
    address = Address(host, port)
    assert parse_address(str(address)) == address


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_an_address_error(text):
    try:
        address = parse_address(text)
    except AddressError:
        return
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0:0:0:0:0:0:0:0"])
def test_a_wildcard_bind_is_never_advertised(host):
    bound = Address(host, 8998)
    assert bound.is_wildcard
    with pytest.raises(AddressError, match="PDLINK_ADVERTISE_HOST"):
        advertised(bound, None)
    with pytest.raises(AddressError, match="PDLINK_ADVERTISE_HOST"):
        advertised(bound, host)
    assert advertised(bound, "10.0.0.7") == Address("10.0.0.7", 8998)


def test_a_bound_address_is_advertised_as_it_is():
    assert advertised(Address("::1", 5), None) == Address("::1", 5)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)]
    + [("10.0.0.1", False), ("0.0.0.0", False), ("::", False), ("localhost.example.com", False), ("host", False)],
)
def test_loopback_is_what_only_this_machine_can_reach(host: str, loopback: bool) -> None:
    assert Address(host, 1).is_loopback is loopback
