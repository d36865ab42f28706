"""The flow: a list of named functions that a batch passes through. The trainers run on this and nothing else.

    flow = DataFlow()
    flow.add_operator(Operator("gen", generate, writes=("responses",)))
    flow.add_operator(Operator("reward", score, reads=("responses",), writes=("token_level_scores",)))
    flow.add_operator(report)                        # a plain function is an operator of its own name
    batch = flow.compile().run(prompts)

What a function returns decides what happens to the batch:

- `writes` declared: the result (a DataProto, or a mapping of columns) is *added* to the batch;
- no `writes`: the result *is* the batch from there on (repeat, filter, reorder);
- None: the batch goes on unchanged (monitors, updates);
- HOLD: the operator keeps the batch and the pass ends here (dynamic sampling).

A function gets the batch in containers of its own: columns reach the flow by being returned, and those of an operator
with `writes` by being declared. Facts (`meta_info`) that it sets on the batch it was given, or on the one it returns,
go on in every case; `meta_info["metrics"]` and `["timing"]` are merged over the flow.

Execution is eager and in list order: the stack trace of a failing function is fit -> run -> that function. Operators
that say where their work is done (`Operator.on`) may overlap where nothing is read from one another; what each of them
is given, and so every number, is the same with and without.

    operator   Operator, HOLD, Stateful, and the edges between operators
    flow       DataFlow: the list, its edits and its check
    pipeline   Pipeline: sends batches through
    order      which operator waits for which, and which columns it sees
    one_pass   one batch on its way
    results    from what a function returned to the batch after it
"""

from verl.dataflow.flow import DataFlow
from verl.dataflow.operator import CONTROLLER, HOLD, Operator, Stateful, as_operator, edges
from verl.dataflow.pipeline import Pipeline

__all__ = ["CONTROLLER", "HOLD", "DataFlow", "Operator", "Pipeline", "Stateful", "as_operator", "edges"]
