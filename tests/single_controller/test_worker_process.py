"""What the process of a rank answers to each message: its loop, run in a thread here."""

import socket
import threading
from pathlib import Path

import pytest

from verl.single_controller import WorkerError, WorkerSpec
from verl.single_controller.dispatch import Call
from verl.single_controller.local.column_files import call_parcel
from verl.single_controller.local.transport import Kind, receive, send
from verl.single_controller.local.worker_main import WorkerHost
from verl.single_controller.worker import Place

WORKERS = str(Path(__file__).with_name("pool_workers.py"))


@pytest.fixture
def ask(monkeypatch):
    """A function that sends one message and gives the kind and content of the answer."""
    monkeypatch.setenv("RANK", "3")
    ours, theirs = socket.socketpair()
    loop = threading.Thread(target=WorkerHost().serve, args=(theirs,))
    loop.start()

    def ask(kind: Kind, content) -> tuple:
        if kind is Kind.START:
            send(ours, kind, 5, content)
        else:
            role, method, *args = content
            call_parcel(role, method, Call(tuple(args))).send(ours, kind, 5)
        answer = receive(ours)
        assert answer.call_id == 5
        return answer.kind, answer.load()

    place = Place(rank=3, world_size=4)
    specs = {"ref": WorkerSpec((WORKERS, "Trouble")), "echo": WorkerSpec((WORKERS, "Echo"))}
    assert ask(Kind.START, (specs, place)) == (Kind.RESULT, None)
    yield ask
    ours.close()  # the parent is gone: the loop ends by itself
    loop.join(5)
    assert not loop.is_alive()
    theirs.close()


def failure(answer: tuple) -> WorkerError:
    kind, (when, error) = answer
    assert kind is Kind.FAILURE and when > 0
    return error


def test_results_travel_only_to_who_asks(ask):
    assert ask(Kind.CALL, ("echo", "echo", "x")) == (Kind.RESULT, "x")
    assert ask(Kind.SILENT_CALL, ("echo", "echo", "x")) == (Kind.RESULT, None)
    assert ask(Kind.CALL, ("echo", "only_zero")) == (Kind.RESULT, 3)


def test_failures_tell_where_and_why(ask):
    error = failure(ask(Kind.CALL, ("ref", "raise_on", 3, "a.txt")))
    assert (error.role, error.method, error.rank, error.host) == ("ref", "raise_on", 3, socket.gethostname())
    assert error.message == "FileNotFoundError: no file a.txt"
    assert error.traceback.rstrip().endswith(error.message) and "worker_process.py" not in error.traceback
    assert "SystemExit: 7" in failure(ask(Kind.CALL, ("ref", "leave", 7))).message


def test_a_result_that_cannot_travel_is_a_failure(ask):
    error = failure(ask(Kind.CALL, ("ref", "give_a_lock")))
    assert "cannot pickle" in error.message and "while the result was packed for the caller" in error.traceback
    assert error.method == "give_a_lock"


def test_a_worker_that_cannot_be_made_is_named(ask):
    specs = {"echo": WorkerSpec((WORKERS, "Echo")), "actor": WorkerSpec((WORKERS, "Trouble"), {"fail_on_rank": 3})}
    error = failure(ask(Kind.START, (specs, Place(rank=3))))
    assert (error.role, error.method) == ("actor", "__init__") and "no such model" in error.message
    error = failure(ask(Kind.START, ({"actor": WorkerSpec(("no/such/file.py", "Echo"))}, Place())))
    assert "no file 'no/such/file.py'" in error.message
