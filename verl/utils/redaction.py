"""Removes secrets and control characters from logs and files.

Secrets are found by the names of settings and environment variables, and in URLs. Their values are replaced in all that
the library writes or prints: configurations, logs, errors, records of runs. A value that a setting reads from the
environment is replaced by its expression, `${oc.env:NAME}`, so that a saved configuration can be loaded again.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

REDACTED = "<not saved>"

#: settings of environment variables, which may all be secrets
_ENVIRONMENTS = ("worker_env", "env_vars")
#: words in the names of secrets
_SECRETS = frozenset(
    (
        *("secret", "secrets", "password", "passwd", "passphrase", "pwd", "credential", "credentials"),
        *("auth", "token", "apikey", "authorization", "bearer"),
    )
)
#: words before `key`, for which its value is a secret; after others it is often the name of a column
_KEYS = frozenset(["api", "access", "private", "secret", "signing", "encryption", "license", "auth", "account"])
#: words before `token`, for which it is a token of a vocabulary
_VOCABULARY = frozenset(
    (
        *("eos", "bos", "pad", "unk", "sep", "cls", "mask", "image", "video", "audio", "stop", "special"),
        *("begin", "end", "first", "last", "start", "think", "turn", "newline", "separator", "response", "assistant"),
    )
)
#: words after which it is a property of the secret: SSH_AUTH_SOCK, TOKEN_FILE
_PROPERTIES = frozenset(
    (
        *("mode", "sock", "file", "path", "dir", "type", "method", "name", "url", "timeout", "ttl"),
        *("enabled", "limit", "count", "length", "budget", "level", "column", "ids"),
    )
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
#: user and password of a URL, and secrets in its query
_IN_URL = re.compile(r"(\w:/{1,2})([^/\s@:'\"]*:[^/\s@'\"]+|[^/\s@:'\"]{16,})(?=@)")  # one slash: as pathlib writes it
_IN_QUERY = re.compile(r"(?<=[?&])([\w\-]+)=([^&\s'\"#]+)")
#: shorter values would also be found in other words
_SHORTEST = 8

#: environment variable with the names of the variables that settings have read; child processes inherit it
_INTERPOLATED = "VERL_INTERPOLATED_VARIABLES"

#: secret -> what it is replaced by
_known: dict[str, str] = {}
#: (key, value) of settings that are read from the environment -> as they were written
_expressions: dict[tuple[str, str], str] = {}
Replacements = tuple[re.Pattern[str], dict[str, str]]
_NOTHING: Replacements = (re.compile(r"(?!)"), {})
#: the environment and the size of `_known` when they were read last; all secrets, and those that settings have read
_read: tuple[dict[Any, Any] | None, int, Replacements, Replacements] = (None, 0, _NOTHING, _NOTHING)


def is_secret_name(name: object) -> bool:
    """Whether the value of a setting or variable of this name is a secret: HF_TOKEN, api_key, dbPassword."""
    text = str(name)
    words = [word.lower() for word in _WORD.findall(text)]
    if text == "PWD" or (words and words[-1] in _PROPERTIES):
        return False
    for before, word in zip(["", *words], words):
        if word == "key" and (before in _KEYS or text.isupper()):
            return True
        if word in _SECRETS and not (word == "token" and before in _VOCABULARY):
            return True
    return False


def redact(value: Any, name: object = "", variables: bool = True) -> Any:
    """A setting without secrets: values by their names, variables of environments, and credentials in URLs.

    Secrets by name are texts in mappings; the fields of the schema itself have none.

    Args:
        name: the dotted key of the setting.
        variables: also replace what is read from the environment.
    """
    if isinstance(value, Mapping):
        in_environment = str(name).rpartition(".")[2] in _ENVIRONMENTS
        result = {}
        for key, item in value.items():
            below = f"{name}.{key}"
            if in_environment or (isinstance(item, str) and is_secret_name(key)):
                result[key] = _expressions.get((below, str(item)), REDACTED)
            else:
                result[key] = redact(item, below, variables)
        return result
    if isinstance(value, list | tuple):
        return type(value)(redact(item, name, variables) for item in value)
    if not isinstance(value, str):
        return value
    if variables and (str(name), value) in _expressions:
        return _expressions[str(name), value]
    return redact_urls(_replaced(value, _secrets()[1] if variables else _NOTHING))


def redacted(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without secrets, for trackers, checkpoints and comparing two runs."""
    return {key: redact(value, key) for key, value in flat.items()}


def digests(flat: Mapping[str, Any]) -> dict[str, str]:
    """Key -> digest of the value, of settings that are read from the environment: to notice that it has changed."""
    plain = {key: redact(value, key, variables=False) for key, value in flat.items()}
    return {key: digest(value) for key, value in plain.items() if value != redact(flat[key], key)}


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode(errors="replace")).hexdigest()[:16]


def not_saved(flat: Mapping[str, Any]) -> list[str]:
    """The keys whose values `redacted` has removed."""
    keys = []
    for key, value in flat.items():
        if is_redacted(value):
            keys.append(str(key))
        elif isinstance(value, Mapping):
            keys += [f"{key}.{inner}" for inner in not_saved(value)]
    return keys


def redact_urls(text: str) -> str:
    """A text without the credentials in its URLs."""
    if ":/" not in text:
        return text
    return _IN_QUERY.sub(_redact_parameter, _IN_URL.sub(rf"\1{REDACTED}", text))


def _redact_parameter(match: re.Match[str]) -> str:
    is_secret = is_secret_name(match[1]) or match[1].lower() in ("key", "sig", "signature")
    return f"{match[1]}={REDACTED}" if is_secret else match[0]


def is_redacted(value: Any) -> bool:
    """Whether `redact` has removed something from a text or list."""
    return REDACTED in value if isinstance(value, str) else isinstance(value, list) and any(map(is_redacted, value))


def remember_secrets(values: Mapping[str, Any], include_all: bool = False) -> None:
    """Replace these values in texts from here on, if their names are those of secrets, or `include_all`."""
    secrets = (
        str(value)
        for name, value in values.items()
        # a folder that exists, such as HF_HOME, is part of other paths
        if is_secret_name(name.rpartition(".")[2]) or (include_all and not os.path.exists(str(value)))
    )
    _known.update((value, REDACTED) for value in secrets if len(value) >= _SHORTEST and value != REDACTED)


def remember_variable(name: str) -> None:
    """Replace the value of an environment variable, which a setting has read."""
    names = dict.fromkeys([*os.environ.get(_INTERPOLATED, "").split(), name])
    os.environ[_INTERPOLATED] = " ".join(names)


def remember_expression(key: str, value: Any, expression: Any) -> None:
    """Save a setting as it was written, if it is read from the environment."""
    if isinstance(expression, str) and "${oc.env:" in expression and isinstance(value, str) and not _is_path(value):
        _expressions[key, value] = expression


def _is_path(value: str) -> bool:
    """Whether a value names a place in the file system, which is part of other paths."""
    absolute = value.startswith("/") and os.path.isdir("/" + value.split("/")[1])
    return absolute or os.path.exists(os.path.expanduser(value))


def remember_arguments(arguments: Iterable[str]) -> None:
    """`remember_secrets` of `key=value` on a command line."""
    for argument in arguments:
        key, _, value = argument.lstrip("-+").partition("=")
        in_environment = any(f".{name}." in f".{key}" for name in _ENVIRONMENTS)
        remember_secrets({key: value.strip("'\"")}, include_all=in_environment)
        # the shell has inserted a variable: `key=$TOKEN`
        _known.update((secret, text) for secret, text in _secrets()[0][1].items() if secret in argument)


def remember_settings(flat: Mapping[str, Any]) -> None:
    """`remember_secrets` of the settings that `redact` replaces."""
    for key, value in flat.items():
        if isinstance(value, Mapping):
            in_environment = str(key).rpartition(".")[2] in _ENVIRONMENTS
            remember_secrets({str(k): v for k, v in value.items() if isinstance(v, str)}, include_all=in_environment)
            remember_settings({} if in_environment else value)


def secrets_of_settings() -> dict[str, str]:
    """Secret -> what it is replaced by, of those in settings, which are sent to other hosts: for `learn_secrets`."""
    return _known | _secrets()[1][1]


def learn_secrets(secrets: Mapping[str, str]) -> None:
    """Replace the `secrets_of_settings` of the controller, whose environment and command line this process lacks."""
    _known.update(secrets)


def redact_text(text: str) -> str:
    """A text for a log, an error or a file of a run: without secrets of the environment and of the settings."""
    return redact_urls(_replaced(text, _secrets()[0]))


def _replaced(text: str, replacements: Replacements) -> str:
    pattern, values = replacements
    return pattern.sub(lambda match: values[match[0]], text)


def _replacements(values: dict[str, str]) -> Replacements:
    longest_first = sorted(values, key=len, reverse=True)
    return (re.compile("|".join(map(re.escape, longest_first))), values) if values else _NOTHING


def _secrets() -> tuple[Replacements, Replacements]:
    """All values to replace, and those that settings have read. The environment is read again if it has changed."""
    global _read
    environment = getattr(os.environ, "_data", os.environ)  # the dict of bytes: comparing it takes a microsecond
    if environment != _read[0] or len(_known) != _read[1]:
        before = dict(environment)
        variables = {os.fsdecode(name): os.fsdecode(value) for name, value in before.items()}
        long = {name: value for name, value in variables.items() if len(value) >= _SHORTEST}
        values = dict.fromkeys((value for name, value in long.items() if is_secret_name(name)), REDACTED) | _known
        names = variables.get(_INTERPOLATED, "").split()
        read = {long[name]: f"${{oc.env:{name}}}" for name in names if name in long and not _is_path(long[name])}
        _read = before, len(_known), _replacements(values | read), _replacements(read)
    return _read[2:]


def printable(text: str) -> str:
    """Escape control characters, which could change the state of the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\t\n" else repr(c)[1:-1] for c in text)


def console_text(text: str) -> str:
    """A text for the console, without secrets and control characters."""
    return printable(redact_text(text))
