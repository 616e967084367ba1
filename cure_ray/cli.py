"""`cure-ray`: the command line. Bad input ends with a sentence and exit code 2, never with a traceback."""

import sys
from typing import Annotated

import typer

from cure_ray import __version__
from cure_ray.commands import (
    attack_text,
    board,
    certify,
    data,
    doctor,
    embed,
    export,
    fsck,
    judge,
    quickstart,
    radius,
    report,
    show,
    status,
    submit,
    sweep,
    train,
    zoo,
)
from cure_ray.errors import SoundnessError, UserError, storage_full

app = typer.Typer(
    name="cure-ray",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train networks that are provably robust to several norms at once, certify them, and read the tables.\n\n"
    "Start with `cure-ray quickstart`, then `cure-ray train smoke --set training.method=max`.",
)
app.command("quickstart")(quickstart.quickstart)
app.command("train")(train.train)
app.command("certify")(certify.certify)
app.command("radius")(radius.radius)
app.command("fsck")(fsck.fsck)
app.command("judge")(judge.judge)
app.add_typer(zoo.app, name="zoo")
app.command("sweep")(sweep.sweep)
app.command("status")(status.status)
app.command("submit")(submit.submit)
app.command("doctor")(doctor.doctor)
app.command("data")(data.data)
app.command("export")(export.export)
app.command("embed")(embed.embed)
app.command("attack-text")(attack_text.attack_text)
app.command("report")(report.report)
app.command("board")(board.board)
app.command("config")(show.config)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"cure_ray {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Options that need no subcommand."""


def main() -> None:
    """Entry point: turns our errors into sentences and exit codes."""
    from cure_ray.runs.stopping import StoppedError

    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if not storage_full(error):
            raise
        print(f"error: no room left for {error.filename or 'a file'}; free some space and run the same command again", file=sys.stderr)
        sys.exit(2)
    except StoppedError as error:
        print(error, file=sys.stderr)
        sys.exit(130)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except SoundnessError as error:
        print(f"SOUNDNESS ERROR: {error}", file=sys.stderr)
        sys.exit(3)
