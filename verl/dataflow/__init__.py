"""The flow: a list of named functions that a batch passes through. All trainers run on it.

    flow = DataFlow()
    flow.add_operator(Operator("gen", generate, writes=("responses",)))
    flow.add_operator(Operator("reward", score, reads=("responses",), writes=("token_level_scores",)))
    flow.add_operator(report)                        # a plain function is an operator of the same name
    batch = flow.compile().run(prompts)

The return value of a function determines what happens to the batch:

- with `writes` declared (a DataProto or a mapping of columns), or a mapping: the result is *added* to the batch;
- a DataProto without `writes`: the result *replaces* the batch (repeat, filter, reorder);
- None: the batch is unchanged (monitors, updates);
- HOLD: the operator keeps the batch and the run ends here (dynamic sampling).

A function receives a copy of the batch's containers: to change a column, return it. `meta_info` entries that a function
sets on the batch it was given, or on the one it returns, are kept in every case; `meta_info["metrics"]` and
`["timing"]` are merged over the flow.

Operators run in list order, and the stack trace of a failing function is fit -> run -> that function. Operators that
declare where they run (`Operator.on`) may overlap if they are independent; each sees the same columns, and gives the
same numbers, with and without the overlap.

    operator   Operator, HOLD, Stateful; edges and dependencies between operators
    flow       DataFlow: the list, its edits and its check; Pipeline: runs batches through the operators
    run        PipelineRun: one batch on its way, and the batch after each operator
"""

from verl.utils.lazy import lazy_names

_HOME = {
    "verl.dataflow.flow": "DataFlow Pipeline",
    "verl.dataflow.operator": "CONTROLLER HOLD Operator Stateful as_operator edges running running_operator",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
