"""Commands on data before a run: `verl data inspect` shows how rows are read, `verl rewards test` what is paid."""

from collections import Counter
from typing import Annotated, Any

import typer

from verl.utils.redaction import console_text

data = typer.Typer(help="Inspect data files.", no_args_is_help=True)
rewards = typer.Typer(help="Try reward functions.", no_args_is_help=True)

_Data = Annotated[str, typer.Argument(metavar="DATA", help="a file, a folder or a dataset of the Hub")]
_Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="keys of `verl train`")]


@data.command("inspect")
def inspect(path: _Data, overrides: _Overrides = None) -> None:
    """Show columns, lengths, the first prompt and bad rows of a file; with a model path, lengths in tokens, too."""
    _run(_inspect, path, overrides)


@rewards.command("test")
def test(path: _Data, overrides: _Overrides = None) -> None:
    """Score right, wrong and empty responses of each data source; list the rows whose ground truth is not read."""
    _run(_test, path, overrides)


def _run(command: Any, path: str, overrides: list[str] | None) -> None:
    """Call a command with the configuration and the rows; prints the bad rows that it returns."""
    from verl.config.load import read_config
    from verl.config.schema import Config
    from verl.data.columns import find_columns
    from verl.data.files import read_rows
    from verl.trainer.startup.command_line import user_errors
    from verl.utils.log import setup_logging

    setup_logging()
    with user_errors():
        config = read_config(None, [f"data.train_files={path}", *(overrides or [])], schema=Config).config
        rows = read_rows(config.data.train_files)
        section = find_columns(rows, config.data)
        bad = command(config.model_copy(update={"data": section}), rows)
    alike: dict[str, list[str]] = {}  # by the first line of the reason
    for text in bad:
        alike.setdefault(text.partition("\n")[0].partition(": ")[2], []).append(text)
    lines = [f"{len(rest) + 1:,} rows, such as {text}" if rest else text for text, *rest in alike.values()]
    _print(f"bad rows: {len(bad):,} of {len(rows):,}", *lines, sep="\n  ")
    raise typer.Exit(bool(bad))


def _print(*cells: Any, sep: str = "  ") -> None:
    typer.echo(console_text(sep.join(map(str, cells))))


def _inspect(config: Any, rows: Any) -> list[str]:
    from verl.config.schema import SFTDataConfig
    from verl.data.sft_dataset import find_sample_columns

    types: dict[str, Counter] = {name: Counter() for name in rows.columns}
    lengths: dict[str, list[int]] = {name: [] for name in (*rows.columns, "prompt in tokens")}
    for row in rows:
        for name in rows.columns:
            types[name][type(row[name]).__name__] += 1
            lengths[name].append(len(str(row[name])))
    read = _read_texts if config.actor_rollout_ref.model.path is None else _read_tokens
    lengths["prompt in tokens"], first, bad = read(config, rows)
    for name, sizes in lengths.items():
        if sizes:
            kinds = ", ".join(f"{kind} {count:,}" for kind, count in types.get(name, {}).items())
            _print(f"{name:<20} length {min(sizes):,} to {max(sizes):,}, mean {sum(sizes) / len(sizes):,.0f}", kinds)
    _print("first prompt:", first)
    try:
        find_sample_columns(rows, SFTDataConfig())
    except ValueError as error:
        _print("not data for verl sft:", error)
    return bad


def _read_texts(config: Any, rows: Any) -> tuple[list[int], Any, list[str]]:
    """(no lengths, the first prompt, the bad rows)."""
    from verl.data.columns import reward_model
    from verl.data.forms import read_prompt_column
    from verl.data.messages import with_system
    from verl.data.tokenization import read_prompt

    section, prompts, bad = config.data, [], []
    for index, row in enumerate(rows):
        try:
            prompt = read_prompt_column(row, section.prompt_key)
            prompt = read_prompt(prompt, section.prompt_format, False, rows.location(index))
            prompts.append(with_system(prompt, row))
            reward_model(row, rows.location(index), section.ground_truth_key)
        except ValueError as error:
            bad.append(str(error))
    return [], prompts[0] if prompts else "none", bad


def _read_tokens(config: Any, rows: Any) -> tuple[list[int], Any, list[str]]:
    """(lengths in tokens, the first prompt, the bad rows), as training reads them, with tools and images."""
    from verl.data.bad_rows import BadRowsError
    from verl.data.processor import load_processor
    from verl.data.rlhf_dataset import RLHFDataset
    from verl.data.tokenization import load_tokenizer

    model = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(model)
    section = config.data.model_copy(update={"max_bad_rows": len(rows) - 1, "max_prompt_length": 2**31})
    try:
        dataset = RLHFDataset(config.data.train_files, tokenizer, section, load_processor(model, tokenizer))
    except BadRowsError as error:
        return [], "none", [*error.rows.values()]
    lengths = [len(item["prompt_ids"]) for item in dataset]
    return lengths, dataset.describe(0)[0], [*dataset.bad_rows.values()]


def _test(config: Any, rows: Any) -> list[str]:
    from verl.data.columns import data_source, reward_columns, reward_info, reward_model
    from verl.registry import import_module
    from verl.rewards.outcome import BadOutcome, Sample, read_outcome
    from verl.rewards.trial import describe_fault, explain, trial_responses
    from verl.trainer.startup.inputs import load_rewards

    for address in config.imports:
        import_module(address)
    manager, names, bad, tried = load_rewards(config, None), reward_columns(rows, config.data.prompt_key), [], set()
    for index, row in enumerate(rows):
        location, key = rows.location(index), config.data.reward_fn_key
        try:
            source = row[key] if key in row else data_source(row, rows, index, key)
            function = manager.compute_score.for_data_source(source)
            truth = reward_model(row, location, config.data.ground_truth_key)["ground_truth"]
            kinds = {"empty": [""]} if source in tried else trial_responses(truth, row.get("solution"))
            pairs = [(kind, text) for kind, texts in kinds.items() for text in texts]
            sample = {"data_source": source, "ground_truth": truth, "extra_info": reward_info(row, names)}
            sample |= {"prompt": row[config.data.prompt_key], "total": len(pairs)}
            samples = [Sample(solution_str=text, number=i, **sample) for i, (_, text) in enumerate(pairs)]
            outcomes = {i: read_outcome(outcome) for i, _, outcome in [*manager.outcomes(samples)]}
        except (BadOutcome, ValueError) as error:
            bad.append(f"{location}: {error}")
            continue
        if source in tried:
            continue
        tried.add(source)
        match = "no ground truth: data.answer_key names its column" if truth is None else f"ground truth {truth!r:.80}"
        _print(f"{source}: {function.location}; {match} ({location})")
        scores: dict[str, list[float]] = {}
        for i, (kind, text) in enumerate(pairs):
            value, extra = outcomes[i]
            scores.setdefault(kind, []).append(value)
            _print(f"  {kind:<6}{value:>8g}  {text!r:.100}  {explain(function, text, extra)}")
        if fault := describe_fault(scores):
            bad.append(f"{location}: the reward {fault}")
    return bad
