"""LocalWorkerGroup: workers on this host, without Ray. One worker is an object of this process."""

from collections.abc import Mapping

from verl.single_controller.dispatch import Call
from verl.single_controller.worker import Place, WorkerSpec, free_port
from verl.single_controller.worker_group import Future, WorkerGroup


class LocalWorkerGroup(WorkerGroup):
    """One worker in this process: a call on the group is a call of the method.

    An error passes as it was raised, with its own stack, and a note that names role and rank. The call has run when a
    Future is returned, so a non-blocking call raises its error at once too.
    """

    def __init__(self, spec: WorkerSpec, n_workers: int = 1, name: str | None = None):
        if n_workers != 1:
            raise ValueError(f"n_workers: expected 1, found {n_workers}")
        super().__init__(spec.worker_class, 1, name)
        self.worker = spec.build(Place(master_port=free_port()))

    def execute(self, method: str, calls: list[Call | None]) -> Future[list]:
        (call,) = calls
        try:
            return Future.of([call.finish(getattr(self.worker, method)(*call.args, **call.kwargs))])
        except Exception as error:
            error.add_note(f"in {self.name}.{method}(), rank 0 of 1, in this process")
            raise


def colocate(specs: Mapping[str, WorkerSpec], n_workers: int = 1) -> dict[str, LocalWorkerGroup]:
    """Several roles in the same process(es): one group per role, called in turn."""
    return {role: LocalWorkerGroup(spec, n_workers, name=role) for role, spec in specs.items()}
