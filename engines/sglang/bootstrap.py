"""Owns the bootstrap server of a prefill instance in sglang's main process: one port for pdlink's directory (gRPC) and
for what sglang asks over HTTP. It keeps neither the registrations nor the answers themselves.
"""

from __future__ import annotations

import dataclasses
import logging

from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer
from sglang.srt.runtime_context import get_parallel, get_serving

from pdlink.address import Address
from pdlink.bootstrap.server import BootstrapServer
from pdlink.errors import InvalidInput
from pdlink_engines.sglang.http_answers import HttpAnswers, PrefillFacts
from pdlink_engines.sglang.plugin import refusal
from pdlink_engines.sglang.settings import process_settings
from pdlink_engines.sglang.shared_port import SharedPort

log = logging.getLogger("pdlink.sglang")

LOOPBACK = Address("127.0.0.1", 0)


class PdlinkKVBootstrapServer(BaseKVBootstrapServer):
    """Serves at `host`:`port`, which are sglang's `--host` and `--disaggregation-bootstrap-port`.

    The two servers behind the port are bound to loopback, and only the port itself to `host`. Raises `SystemExit`
    where it cannot be bound. `close` twice is fine.
    """

    def __init__(self, host: str, port: int) -> None:
        # The directory is reached through the port here, so it must not carry the host that control sockets advertise.
        settings = process_settings().model_copy(update={"advertise_host": None})
        parallel = get_parallel()
        self._num_ranks = parallel.dp_size * parallel.tp_size * parallel.pp_size
        facts = PrefillFacts(
            parallel.num_dp_ranks, parallel.load_balance_method == "follow_bootstrap_room", get_serving().port
        )
        self._directory = BootstrapServer.start(LOOPBACK, settings)
        self._http = HttpAnswers(facts, self._why_not_ready)
        try:
            self._port = SharedPort(Address(host, port), self._directory.address, self._http.address)
        except BaseException as error:
            self._http.close()
            self._directory.close()
            if isinstance(error, InvalidInput):
                # Whoever launches reads one line, as for every other refusal of the plug-in.
                raise refusal(f"{error}; choose another --disaggregation-bootstrap-port or --host") from error
            raise
        self._http.caller_of = self._port.caller_of
        self.host, self.port = host, self._port.port
        log.info("pdlink bootstrap serves at %s:%d: %s", host, self.port, dataclasses.asdict(facts))

    def close(self) -> None:
        self._port.close()
        self._http.close()
        self._directory.close()

    def _why_not_ready(self) -> str | None:
        num_workers = self._directory.num_workers
        if num_workers >= self._num_ranks:
            return None
        return f"{num_workers} of {self._num_ranks} prefill ranks have registered with pdlink"
