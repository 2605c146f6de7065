"""Owns what a caller brings to a bootstrap: its TLS files, its token, and the rule when secrets may be sent at all."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from pdlink.address import Address
from pdlink.bootstrap.renewed import Renewed
from pdlink.bootstrap.tls import TlsFiles, read_client
from pdlink.bootstrap.token import SCHEME, TOKEN_KEY, read_tokens
from pdlink.config import PREFIX, Settings
from pdlink.errors import ConfigError
from pdlink.secret import Secret


class Access:
    """Credentials of a caller, as the files had them when it was made.

    Raises `ConfigError` naming the setting, the path and the fault.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings = settings or Settings()
        self.files: TlsFiles | None = read_client(settings)
        self._token: Secret | None = next(iter(read_tokens(settings)), None)

    @property
    def is_tls(self) -> bool:
        return self.files is not None

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def may_send_secrets(self, address: Address) -> bool:
        """Whether a token or a key may go to `address`: encrypted, or not leaving this machine, or allowed."""
        return self.is_tls or address.is_loopback or self.settings.allow_plaintext_secrets

    def check(self, addresses: Iterable[Address], *, sends_keys: bool = False) -> None:
        """Raise `ConfigError` where a secret would go over the network in plain text."""
        what = "the token" if self.has_token else "control keys" if sends_keys else ""
        for address in addresses if what else ():
            if not self.may_send_secrets(address):
                raise ConfigError(
                    f"{what} would go to bootstrap {address} in plain text, for everyone on the way to read; set "
                    f"{PREFIX}TLS_CA, or, on a network that you trust, {PREFIX}ALLOW_PLAINTEXT_SECRETS=1"
                )

    def open(self, address: Address, options: Iterable[tuple[str, int | str]]) -> grpc.Channel:
        """A channel to `address`. Raises `ConfigError` as `check` does."""
        self.check([address])
        if self.files is None:
            return grpc.insecure_channel(str(address), options=tuple(options))
        key, certificate = self.files.pair or (None, None)
        credentials = grpc.ssl_channel_credentials(self.files.ca, key, certificate)
        name = self.settings.tls_server_name
        named = (("grpc.ssl_target_name_override", name),) if name else ()
        return grpc.secure_channel(str(address), credentials, options=(*options, *named))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return ((TOKEN_KEY, SCHEME + self._token.reveal().decode()),) if self._token else ()


def renewed_access(settings: Settings) -> Renewed[Access]:
    """The credentials of `settings`, renewed with their files. Raises `ConfigError` for those that cannot be used."""
    paths = (settings.tls_certificate, settings.tls_key, settings.tls_ca, settings.token_file)
    return Renewed(paths, lambda: Access(settings))
