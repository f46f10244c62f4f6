"""``docs/configuration.md``, written from the models: what it says is what the code takes."""

from typing import Final

from deploy.config.reference import FieldReference, SectionReference, reference

INTRODUCTION: Final = """\
# Configuration

One YAML file, the same locally, in a Ray job and in a chart. [examples](../examples) has some to
start from. This page is what `sluice config reference` prints. Every field has a default, unless it
says `required`; an empty default is `null`.

## Where values come from

Later ones win: **defaults < file < environment < command line**.

| from | how | such as |
|---|---|---|
| file | `--config FILE` | `cache: {block_size: 32}` |
| environment | `SLUICE__SECTION__FIELD`, in capitals; an empty one says nothing | `SLUICE__CACHE__BLOCK_SIZE=32` |
| command line | `--set section.field=value`; of one field the last one counts | `--set cache.block_size=32` |
| command line | `--model`, `--prefill`, `--decode`, `--host`, `--port`; they win over `--set` | `--port 9000` |

Values in the environment and in `--set` are YAML: `null` takes a value away, `[0, 2]` is a list,
`{cache: {block_size: 32}}` a mapping, whose fields join those that are there. A field that takes
text has it as it is, even if it looks like a number. Only the process that starts the deployment
reads the file and the environment; it tells all others, wherever they run.

Other variables: `SLUICE_CACHE` (else `XDG_CACHE_HOME/sluice`, else `~/.cache/sluice`) keeps the
fetched model; `RAY_ADDRESS` names a cluster where `deploy.ray_address` does not; `SLUICE_POISON=1`
sets `cache.poison`, `0` clears it, unless `SLUICE__CACHE__POISON` is there.

## Look before you start

```
sluice config check FILE                   # every error, with its line and what to give; warnings
sluice config show --config FILE           # what would hold, and where each value was given
sluice config show --config FILE --role decode          # what workers of one role would go by
sluice config reference                    # this page
```

`check` and `show` count in the environment and take `--set` as `serve` does. `check` ends with exit
code 2 if there is an error, 0 if there are only warnings: combinations that are allowed and seldom
meant, such as pools larger than this machine's memory.

Unknown names, names given twice, wrong types, numbers out of bounds and fields that do not go
together stop the start, in one line that names file, line and column, or the variable or flag.
Anchors, tabs as indentation and a second YAML document are refused, and so are files of more than
128 KiB.

## What one role has otherwise

`prefill` and `decode`, at the top of the file, hold what workers of that role have otherwise than
the sections say, for `model`, `cache`, `scheduler`, `engine` and `transfer`:

```yaml
cache: {block_size: 16, memory_gib: 8}      # of all workers
prefill: {cache: {memory_gib: 2}}           # but for this one field, of prefill workers
decode: {scheduler: {max_num_seqs: 256}}
```

A field that is not named there is that of the section above, not the default. The result is checked
for each role as a whole. In the environment it is `SLUICE__DECODE__CACHE__BLOCK_SIZE`, on the
command line `--set decode.cache.block_size=64`. (`deploy.prefill` and `deploy.decode` are *how many*
workers there are.) What must be equal on both sides, and what may differ at which cost, is in
[operations](operations.md#prefill-and-decode-of-different-shapes).
"""  # noqa: E501 - rows of a table
HEADER: Final = "| field | takes | unit | default | meaning |\n|---|---|---|---|---|"


def reference_page() -> str:
    """Return the whole page, as Markdown."""
    return "\n".join([INTRODUCTION, *map(_section, reference())])


def _section(section: SectionReference) -> str:
    title = f"`{section.name}`" if section.name else "Top level"
    rows = "\n".join(map(_row, section.fields))
    return f"## {title}\n\n{section.meaning}\n\n{HEADER}\n{rows}\n"


def _row(field: FieldReference) -> str:
    cells = (f"`{field.name}`", field.kind, field.unit, field.default, field.meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
