"""Every test that needs vLLM, SGLang or megatron-core is in a target of the Makefile that installs it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARIES = ("vllm", "sglang", "megatron")
#: folders in which a file is named after the library that it needs; others read the settings of one
NAMED = ("engines", "rollout", "trainer")
#: what tests ask before they use a library
ASKS = {name: rf'(find_spec|importorskip)\(\s*"{name}[".]' for name in LIBRARIES}
ASKS["megatron"] += r"|megatron_cpu import skip_reason"
#: files in no target -> why
ELSEWHERE = {
    "tests/rollout/test_vision.py": "vLLM reads images with torchvision, which has no build for a CPU",
    "tests/gpu/test_gpu_megatron.py": "needs a GPU",
}


def targets() -> dict[str, list[str]]:
    """Library -> the files of its target."""
    text = (ROOT / "Makefile").read_text()
    found = {name: re.search(rf"^test-{name}:.*?\n\n", text, re.M | re.S).group() for name in LIBRARIES}
    return {name: re.findall(r"tests/\S+\.py", recipe) for name, recipe in found.items()}


def needs(path: Path) -> set[str]:
    """The libraries that some tests of a file need."""
    text, is_named = path.read_text(), path.parent.name in NAMED
    return {name for name in LIBRARIES if (is_named and name in path.stem) or re.search(ASKS[name], text)}


def test_every_file_that_needs_a_library_is_in_a_target_that_installs_it():
    listed, needed = targets(), {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path != Path(__file__) and (libraries := needs(path)):
            needed[str(path.relative_to(ROOT))] = libraries
    assert len(needed) >= 20
    for name in LIBRARIES:
        assert sum(name in libraries for libraries in needed.values()) > 2, name
    missing = {file: names for file, names in needed.items() if not any(file in listed[name] for name in names)}
    assert missing.keys() == ELSEWHERE.keys(), missing


def test_targets_have_files_that_exist_once():
    for name, files in targets().items():
        assert len(files) == len(set(files)), name
        assert not [file for file in files if not (ROOT / file).is_file()], name
