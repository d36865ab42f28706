"""The replies of a rank process to each message; its loop runs in a thread here."""

import socket
import threading

import pytest

from tests.single_controller.conftest import spec
from verl.processes.child import Channel
from verl.single_controller import WorkerError, WorkerSpec
from verl.single_controller.dispatch import Call
from verl.single_controller.local.transport import Kind, Parcel, call_parcel, load_result, receive
from verl.single_controller.local.worker_main import WorkerHost
from verl.single_controller.remote_batch import pack
from verl.single_controller.worker import RankEnv
from verl.utils import redaction


@pytest.fixture
def ask(monkeypatch):
    """A function that sends one message and returns the kind and content of the reply."""
    monkeypatch.setenv("RANK", "3")
    ours, theirs = Channel.pair()
    secrets = {"hunter-from-controller": "${oc.env:IT}"}
    monkeypatch.setattr(redaction, "_known", {})
    loop = threading.Thread(target=WorkerHost().serve, args=(theirs,))
    loop.start()

    def ask(kind: Kind, content) -> tuple:
        if kind is Kind.START:
            Parcel((secrets, pack(content))).send(ours, kind, 5)
        else:
            role, method, *args = content
            call_parcel(role, method, Call(tuple(args))).send(ours, kind, 5)
        reply = receive(ours)
        assert reply.call_id == 5
        return reply.kind, load_result(reply)[0] if reply.kind is Kind.RESULT else reply.load()

    rank_env = RankEnv(rank=3, world_size=4)
    specs = {"ref": spec("Failing"), "echo": spec("Echo")}
    assert ask(Kind.START, (specs, rank_env)) == (Kind.RESULT, None)
    yield ask
    ours.close()  # the parent has ended, so the loop ends
    loop.join(5)
    assert not loop.is_alive()
    theirs.close()


def failure(reply: tuple) -> WorkerError:
    kind, (when, error) = reply
    assert kind is Kind.FAILURE and when > 0
    return error


def test_silent_calls_send_no_result(ask):
    assert ask(Kind.CALL, ("echo", "echo", "x")) == (Kind.RESULT, "x")
    assert ask(Kind.SILENT_CALL, ("echo", "echo", "x")) == (Kind.RESULT, None)
    assert ask(Kind.CALL, ("echo", "only_zero")) == (Kind.RESULT, 3)


def test_failures_have_location_and_reason(ask):
    error = failure(ask(Kind.CALL, ("ref", "raise_on", 3, "a.txt")))
    assert (error.role, error.method, error.rank, error.host) == ("ref", "raise_on", 3, socket.gethostname())
    assert error.message == "FileNotFoundError: no file a.txt"
    assert error.traceback.rstrip().endswith(error.message) and "worker_main.py" not in error.traceback
    assert "SystemExit: 7" in failure(ask(Kind.CALL, ("ref", "leave", 7))).message


def test_a_result_that_cannot_be_pickled_is_a_failure(ask):
    error = failure(ask(Kind.CALL, ("ref", "give_a_lock")))
    assert "cannot pickle" in error.message and "while the result was packed for the caller" in error.traceback
    assert error.method == "give_a_lock"


def test_a_worker_that_cannot_be_constructed_is_named(ask):
    specs = {"echo": spec("Echo"), "actor": spec("Failing", fail_on_rank=3)}
    error = failure(ask(Kind.START, (specs, RankEnv(rank=3))))
    assert (error.role, error.method) == ("actor", "__init__") and "no such model" in error.message
    error = failure(ask(Kind.START, ({"actor": WorkerSpec(("no/such/file.py", "Echo"))}, RankEnv())))
    assert "no file 'no/such/file.py'" in error.message


class Unloadable:
    """Raises an error with the text where it is unpickled."""

    def __init__(self, text: str):
        self.text = text

    def __reduce__(self):
        return int, (self.text,)


def test_secrets_are_known_before_the_arguments_of_workers_are_unpickled(ask):
    specs = {"actor": spec("Echo", tp=Unloadable("hunter-from-controller"))}
    error = failure(ask(Kind.START, (specs, RankEnv())))
    assert "'${oc.env:IT}'" in error.message and "hunter" not in str(error)
