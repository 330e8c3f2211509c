"""Reads YAML settings files, and the files that they include with BASE, as {full key: text}."""

import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from configs.values import Text, is_none
from utils.commands import HALFSTEP
from utils.errors import ConfigError, did_you_mean
from utils.files import content_of, or_shipped, short_name
from utils.text import align

# Maximum number of bytes in a file, of files that are read because of BASE lines, and of nesting levels.
MOST_BYTES, MOST_FILES, MOST_LEVELS = 2**20, 100, 16


class Quoted(str):
    """A string that is quoted in its file, so that an open section does not read it as a number, a boolean or None."""


@dataclass(frozen=True)
class Layer:
    """The settings of one file, one flag or -opts, as {full key: text}. Later layers override earlier ones."""

    origin: str
    texts: dict[str, Text]


def shipped_files() -> list[Path]:
    """Return halfstep's own settings files: first the files in configs/, then the recipes."""
    return [*sorted(HALFSTEP.glob("configs/*.yaml")), *sorted(HALFSTEP.glob("configs/recipes/*.yaml"))]


def find_settings_file(cfg: str | None) -> str:
    """Return the path given with -cfg. Raise ConfigError if there is none, or no such file."""
    if not cfg:
        raise ConfigError(
            "no photos and no settings are given; name the folder of your photos, which has a folder for each class, "
            "as in halfstep train photos, or a settings file, as in halfstep train -cfg vit_digits (-cfg list "
            "lists them); -h lists the flags"
        )
    shipped = {name: path for path in shipped_files() for name in (path.stem, path.name)}
    if cfg in shipped and not os.path.isfile(cfg):
        return short_name(shipped[cfg])
    if or_shipped(Path(cfg)).exists():
        return cfg
    near = did_you_mean(Path(cfg).stem, [path.stem for path in shipped.values()])
    if not near and Path(cfg).name == cfg:
        near = f"; these come with halfstep:\n{_describe_shipped_files()}"
    raise ConfigError(f"-cfg: there is no file {cfg} in the working directory {os.getcwd()}{near}")


def _describe_shipped_files() -> str:
    first = {path: path.read_text(encoding="utf-8").splitlines()[0].strip("# ") for path in shipped_files()}
    rows = [(f"  {short_name(path)}", textwrap.shorten(line, 90, placeholder=" ...")) for path, line in first.items()]
    return "\n".join(align(rows))


class Loader(yaml.BaseLoader):
    """Composes nodes with text values.

    Refuses aliases and deep nesting, because they let a small file exhaust the memory.
    """

    level = 0

    def compose_node(self, parent, index):
        line = self.peek_event().start_mark.line + 1
        if self.level >= MOST_LEVELS:
            raise ConfigError(
                f"{self.name}: line {line}: sections or lists are nested more than {MOST_LEVELS} levels deep"
            )
        is_alias = self.check_event(yaml.AliasEvent)
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        if is_alias and not isinstance(node, yaml.ScalarNode):
            raise ConfigError(
                f"{self.name}: line {line}: an alias of a section or list (* or <<) is not supported; "
                "write it out, or name a settings file under BASE"
            )
        return node


def read_layers(path: str, chain: tuple[str, ...] = (), read: list[str] | None = None) -> list[Layer]:
    """Return the layers of a file: first the layers of its BASE files, then its own.

    `chain`: the files that include this one, the outermost first; `read`: all files read so far.
    """
    origin, read = os.path.normpath(path), [] if read is None else read
    read.append(origin)
    if len(read) > MOST_FILES:
        raise ConfigError(f"{read[0]}: its BASE lines lead to more than {MOST_FILES} files; include each file once")
    for position, earlier in enumerate(chain):
        if os.path.realpath(earlier) == os.path.realpath(path):
            loop = " -> ".join([*map(os.path.normpath, chain[position:]), origin])
            raise ConfigError(f"{origin}: its BASE files form a cycle: {loop}; remove one of these BASE lines")
    texts = read_file(path)
    layers = []
    for base in _bases(texts.pop("BASE", ""), origin):
        base_path = os.path.join(os.path.dirname(path), base)
        if not or_shipped(Path(base_path)).exists():
            raise ConfigError(
                f"{origin}: BASE names {base}, but there is no file {os.path.normpath(base_path)} (BASE is relative "
                "to the folder of the file that names it)"
            )
        layers += read_layers(base_path, (*chain, path), read)
    return [*layers, Layer(origin, texts)]


def read_file(path: str) -> dict[str, Text]:
    """Return {full key: text} from one YAML file. Its BASE files are not read."""
    origin = os.path.normpath(path)
    try:
        source = content_of(or_shipped(Path(path)), MOST_BYTES).decode("utf-8-sig")
    except OSError as error:  # for example, no permission
        raise ConfigError(f"{origin}: cannot be read as a settings file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{origin} is not a UTF-8 text file (byte {error.start}), so it cannot be a settings file; give weights "
            "with -pretrained or -resume"
        ) from None
    root = compose(source, origin)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{origin} is not a settings file; it must consist of lines like `TRAIN:` and `NUM_EPOCHS: 5`"
        )
    return dict(_flatten_mapping(root, origin))


def compose(source: str, name: str) -> yaml.Node | None:
    """Return the root node of a YAML text, or None if it is empty. `name`: the file's name, for messages."""
    try:
        loader = Loader(source)
        loader.name = name
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        line, problem = (error.problem_mark or error.context_mark).line, error.problem
    except yaml.reader.ReaderError as error:
        line, problem = source.count("\n", 0, error.position), error.reason
    except (OverflowError, ValueError):
        line, problem = loader.line, "an escape sequence is not a valid character"
    raise ConfigError(f"{name}: line {line + 1} is not valid YAML: {problem}")


def read_node(node: yaml.Node) -> Text:
    """Return the text or list of texts of a YAML node. Raise ValueError for a mapping."""
    if isinstance(node, yaml.SequenceNode):
        return [read_node(member) for member in node.value]
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("a mapping is not a value")
    return Quoted(node.value) if node.style in ("'", '"') else node.value


def _flatten_mapping(node: yaml.MappingNode, origin: str, prefix: str = "") -> Iterator[tuple[str, Text]]:
    """Yield (full key, text) below a section. Duplicate keys are errors, because YAML would drop the first value."""
    lines: dict[str, int] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{origin}: line {line}: the name of a setting is a list or section; it must be text")
        key = prefix + key_node.value
        if key in lines:
            raise ConfigError(f"{origin}: {key} is set twice, in lines {lines[key]} and {line}; remove one of them")
        lines[key] = line
        if isinstance(value, yaml.MappingNode):
            yield from _flatten_mapping(value, origin, key + ".")
        else:
            try:
                yield key, read_node(value)
            except ValueError:
                line = value.start_mark.line + 1
                raise ConfigError(
                    f"{origin}: line {line}: {key} is a list of sections; it must be a list of values"
                ) from None


def _bases(text: Text, origin: str) -> list[str]:
    names = [text] if isinstance(text, str) else text
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{origin}: BASE must be the path of a file, or a list of paths")
    return [name for name in names if not is_none(name)]
