"""DataFlow: an editable list of operators, checked before anything runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from verl.dataflow.operator import Operator, as_operator
from verl.dataflow.pipeline import Pipeline
from verl.registry import check_type, did_you_mean, signature


class DataFlow:
    """An editable list of operators. `compile` checks it and returns the `Pipeline` that runs it.

    flow = DataFlow([load_prompts])                # a plain function is an operator of the same name
    flow.add_operator(Operator("gen", generate, reads="prompts", writes="responses"))
    flow.add_operator(Operator("reward", score, reads="responses", writes="token_level_scores"))
    flow.insert_before("reward", Operator("log", report))
    pipeline = flow.compile()                      # ValueError if a column has no writer
    batch = pipeline.run()
    """

    def __init__(self, operators: Iterable["Operator | Callable"] = ()):
        self._operators: list[Operator] = []
        for operator in operators:
            self.add_operator(operator)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(op.name for op in self._operators)

    def __iter__(self) -> Iterator[Operator]:
        return iter(self._operators)

    def __len__(self) -> int:
        return len(self._operators)

    def __repr__(self) -> str:
        return f"DataFlow({' -> '.join(self.names)})"

    def __getitem__(self, name: str) -> Operator:
        return self._operators[self._index(name)]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def add_operator(self, operator: "Operator | Callable") -> "DataFlow":
        """Append an operator. Its name must be new."""
        return self._insert(len(self), operator)

    def insert_before(self, name: str, operator: "Operator | Callable") -> "DataFlow":
        """Insert an operator before the one called `name`."""
        return self._insert(self._index(name), operator)

    def insert_after(self, name: str, operator: "Operator | Callable") -> "DataFlow":
        """Insert an operator after the one called `name`."""
        return self._insert(self._index(name) + 1, operator)

    def replace(self, name: str, operator: "Operator | Callable") -> "DataFlow":
        """Replace the operator called `name`."""
        index, operator = self._index(name), as_operator(operator)
        if operator.name != name:
            self._require_new(operator.name)
        self._operators[index] = operator
        return self

    def configure(self, settings: Mapping[str, Mapping[str, Any]], key: str) -> "DataFlow":
        """Set keyword-only parameters of the functions of operators.

        Args:
            settings: operator name -> {parameter: value}.
            key: configuration key of `settings`, for messages.

        Raises:
            ValueError: no operator, or no keyword-only parameter, has such a name, or a value has another type.
        """
        for name, values in settings.items():
            if name not in self.names:
                raise ValueError(f"{key}.{name}: the flow has no such operator: {did_you_mean(name, self.names)}")
            operator = self[name]
            parameters = signature(operator.func).parameters
            settable = {n: p for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
            for setting, value in values.items():
                if setting not in settable:
                    raise ValueError(
                        f"{key}.{name}.{setting}: the operator {name!r} has no such keyword-only parameter: "
                        f"{did_you_mean(setting, settable)}"
                    )
                check_type(settable[setting], value, f"{key}.{name}.{setting}")
            self.replace(name, replace(operator, func=partial(operator.func, **values)))
        return self

    def remove(self, name: str) -> "DataFlow":
        """Remove the operator called `name`."""
        del self._operators[self._index(name)]
        return self

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"the flow has no operator {name!r}: {did_you_mean(name, self.names)}")
        return self.names.index(name)

    def _require_new(self, name: str) -> None:
        if name in self.names:
            raise ValueError(
                f"the flow already has an operator {name!r}: choose another name, Operator(name, function), or use "
                f"flow.replace({name!r}, ...)"
            )

    def _insert(self, index: int, operator: "Operator | Callable") -> "DataFlow":
        operator = as_operator(operator)
        self._require_new(operator.name)
        self._operators.insert(index, operator)
        return self

    def compile(self, inputs: Iterable[str] | None = None) -> "Pipeline":
        """Check the flow and return the pipeline that runs it.

        Args:
            inputs: the columns of the batch given to `Pipeline.run`. If the first operator is a source, its `writes`
                declare them. If neither is given, columns without a writer are required of the batch at `run`.

        Raises:
            ValueError: if a column has no writer before its reader. The message names operator and column.
        """
        if not self._operators:
            raise ValueError("the flow has no operators: add one with add_operator")
        for op in self._operators[1:]:
            if not op.accepts_batch:
                raise ValueError(
                    f"operator {op.name!r} takes no batch: only the first operator of a flow may be a source"
                )
        first = self._operators[0]
        pure_source = not first.accepts_batch
        start = set(inputs) if inputs is not None else set(first.writes) if pure_source and first.writes else None
        written: set[str] = set()
        needed: dict[str, None] = {}
        for i, op in enumerate(self._operators):
            for name in op.reads:
                if name in written:
                    continue
                if start is None or name not in start:
                    later = next((writer.name for writer in self._operators[i + 1 :] if name in writer.writes), None)
                    if later is not None:
                        raise ValueError(
                            f"operator {op.name!r} reads {name!r}, which {later!r} writes only after it; "
                            "if the column comes with the batch, declare it: compile(inputs=[...])"
                        )
                    if start is not None:
                        raise ValueError(
                            f"operator {op.name!r} reads {name!r}, but no upstream operator writes it: "
                            f"{did_you_mean(name, start | written)}"
                        )
                needed[name] = None
            written.update(op.writes)
        return Pipeline(tuple(self._operators), () if pure_source else tuple(needed))
