"""What no source file may contain: pickles, eval, wildcard binds, leftovers. Each rule is shown to bite first."""

from __future__ import annotations

import ast
import re

import pytest

from tests.house.tree import Module, imports, modules

PICKLERS = {"pickle", "cPickle", "_pickle", "shelve", "marshal", "dill", "cloudpickle", "joblib"}
# Calls that pickle without naming it: torch's files, multiprocessing's and zmq's objects, numpy's object arrays.
PICKLING_CALLS = {"torch.save", "torch.load", "send_pyobj", "recv_pyobj", "broadcast_object_list"}
PICKLING_CALLS |= {"all_gather_object", "gather_object", "scatter_object_list", "send_object_list", "recv_object_list"}
PICKLING_TYPES = {"Queue", "SimpleQueue", "JoinableQueue", "Pipe", "Manager"}
EVALUATORS = {"eval", "exec", "compile", "__import__"}
WILDCARD = re.compile(r"\b0\.0\.0\.0\b|\[::\]|//\*|//0?:\d")
BINDERS = {"bind", "add_insecure_port", "add_secure_port", "bind_to_random_port", "create_server", "start_server"}
LEFTOVER = re.compile(r"\b(TODO|FIXME|XXX|HACK|WIP)\b")
# The one place that must know a wildcard, in order to refuse to advertise it.
KNOWS_WILDCARDS = {"pdlink.address"}
# Whose threads need no supervisor: it is that itself; what a thread raised is taken by whoever waits for its answer
# (mooncake's reads, sglang's questions); or it is a test's, a command's or a demo's, which ends with it.
MAY_START_THREADS = (
    *("pdlink.threads", "pdlink.backends.lanes", "pdlink_engines.sglang.manager"),
    *("pdlink.testing.", "pdlink.cli.", "pdlink_engines.reference.demo."),
)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def pickles(module: Module) -> list[str]:
    found = [f"imports {name}" for _, name in imports(module) if name.split(".")[0] in PICKLERS]
    for node in ast.walk(module.parse()):
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        if name in PICKLING_CALLS or name.rpartition(".")[2] in PICKLING_CALLS:
            found.append(f"calls {name}")
        owner, _, last = name.rpartition(".")
        if last in PICKLING_TYPES and owner.split(".")[0] in {"multiprocessing", "mp", "context", "ctx", "spawn"}:
            found.append(f"calls {name}")
        found += ["allows pickles" for word in node.keywords if word.arg == "allow_pickle" and _is_true(word.value)]
    for _, name in imports(module):
        owner, _, last = name.rpartition(".")
        if last in PICKLING_TYPES and owner.split(".")[0] == "multiprocessing":
            found.append(f"imports {name}")
    return found


def _is_true(node: ast.expr) -> bool:
    return not (isinstance(node, ast.Constant) and node.value is False)


def evaluations(module: Module) -> list[str]:
    calls = (node for node in ast.walk(module.parse()) if isinstance(node, ast.Call))
    return [f"calls {node.func.id}" for node in calls if isinstance(node.func, ast.Name) and node.func.id in EVALUATORS]


def _docstrings(tree: ast.Module) -> set[int]:
    """The ids of string statements: they bind nothing."""
    statements = (node for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {id(node.value) for node in statements if isinstance(node.value, ast.Constant)}


def wildcards(module: Module) -> list[str]:
    if module.name in KNOWS_WILDCARDS:
        return []
    tree = module.parse()
    prose = _docstrings(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found += [f"line {node.lineno}: {node.value!r}"] if WILDCARD.search(node.value) else []
        if isinstance(node, ast.Call) and _dotted(node.func).rpartition(".")[2] in BINDERS:
            for argument in [*node.args, *(word.value for word in node.keywords)]:
                host = argument.elts[0] if isinstance(argument, ast.Tuple) and argument.elts else argument
                if isinstance(host, ast.Constant) and host.value in ("", "*", "::"):
                    found.append(f"line {node.lineno}: binds {host.value!r}")
        if isinstance(node, ast.Attribute) and node.attr in {"INADDR_ANY", "in6addr_any"}:
            found.append(f"line {node.lineno}: {node.attr}")
    return found


def leftovers(module: Module) -> list[str]:
    found = [f"line {number}: {line.strip()}" for number, line in _lines(module.source) if LEFTOVER.search(line)]
    for node in ast.walk(module.parse()):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if _dotted(raised) == "NotImplementedError":
                found.append(f"line {node.lineno}: raises NotImplementedError")
    return found


def bare_threads(module: Module) -> list[str]:
    """A thread that nobody supervises ends without a word."""
    if module.name.startswith(MAY_START_THREADS):
        return []
    makers = {"Thread", "ThreadPoolExecutor", "start_new_thread"}
    if any(name == "threading.Timer" for _, name in imports(module)):
        makers.add("Timer")
    calls = (_dotted(node.func) for node in ast.walk(module.parse()) if isinstance(node, ast.Call))
    return [f"calls {name}" for name in calls if name.rpartition(".")[2] in makers or name == "threading.Timer"]


def _lines(source: str) -> list[tuple[int, str]]:
    return list(enumerate(source.splitlines(), start=1))


def unsaid(module: Module) -> list[str]:
    """A module with code must say in its first sentence what it owns."""
    tree = module.parse()
    if not tree.body or ast.get_docstring(tree):
        return []
    return ["has no docstring"]


RULES = [pickles, evaluations, wildcards, leftovers, unsaid, bare_threads]


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (pickles, "import pickle"),
        (pickles, "def late():\n    from marshal import loads"),
        (pickles, "import torch\ntorch.load('x', weights_only=True)"),
        (pickles, "import torch.distributed as dist\ndist.broadcast_object_list([1])"),
        (pickles, "socket.recv_pyobj()"),
        (pickles, "import multiprocessing as mp\nmp.Queue()"),
        (pickles, "import multiprocessing\nmultiprocessing.get_context('spawn')\nfrom multiprocessing import Pipe"),
        (pickles, "import numpy\nnumpy.load('x', allow_pickle=True)"),
        (evaluations, "eval('1')"),
        (evaluations, "exec('1')"),
        (wildcards, "HOST = '0.0.0.0'"),
        (wildcards, "address = f'tcp://*:{port}'"),
        (wildcards, "server.add_insecure_port('[::]:0')"),
        (wildcards, "socket.bind(('', 80))"),
        (wildcards, "socket.bind(('::', 80))"),
        (leftovers, "x = 1  # TODO: later"),
        (leftovers, "def f():\n    raise NotImplementedError"),
        (leftovers, "def f():\n    raise NotImplementedError('soon')"),
        (unsaid, "x = 1"),
        (bare_threads, "import threading\nthreading.Thread(target=f).start()"),
        (bare_threads, "from threading import Timer\nTimer(1, f)"),
        (bare_threads, "ThreadPoolExecutor(2)"),
    ],
)
def test_each_rule_bites(rule: object, source: str) -> None:
    assert callable(rule)
    assert rule(Module("pdlink.layout.sample", source)) != []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (pickles, "import queue\nqueue.Queue()\nfrom queue import SimpleQueue"),
        (pickles, "import numpy\nnumpy.load('x', allow_pickle=False)"),
        (evaluations, "model.eval()\nimport re\nre.compile('x')"),
        (wildcards, '"""Never binds 0.0.0.0."""\nsocket.bind(("127.0.0.1", 0))\nname = f"{a}::{b}"'),
        (leftovers, "try:\n    f()\nexcept NotImplementedError:\n    raise"),
        (unsaid, ""),
        (bare_threads, "SupervisedThread(f, 'name', 'owner')"),
    ],
)
def test_no_rule_bites_what_is_fine(rule: object, source: str) -> None:
    assert callable(rule)
    assert rule(Module("pdlink.layout.sample", source)) == []


@pytest.mark.parametrize("rule", RULES)
def test_every_source_file_keeps_the_rule(rule: object) -> None:
    assert callable(rule)
    assert len(modules()) > 20
    assert [f"{module.name} {found}" for module in modules() for found in rule(module)] == []
