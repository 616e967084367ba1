"""`cure-ray attack-text`: exchange words of sentences until a head is wrong, and say how often that works."""

from pathlib import Path
from typing import Annotated

import typer

from cure_ray.commands.embed import NeighboursOption, WordnetOption
from cure_ray.commands.train import DataDirOption


def attack_text(
    run: Annotated[list[Path], typer.Argument(help="Runs of `cure-ray train` on vectors of one `cure-ray embed`.")],
    out: Annotated[str, typer.Option(help="Results directory: a new one, or one that `cure-ray certify` wrote.")],
    attack: Annotated[str, typer.Option(help="Comma separated: pwws (WordNet), cf8 (counter-fitted neighbours).")] = "pwws,cf8",
    samples: Annotated[int | None, typer.Option(min=1, help="How many test sentences; default: the experiment's.")] = None,
    budget: Annotated[int, typer.Option(min=1, help="Sentences one attack may have classified.")] = 2000,
    wordnet: WordnetOption = None,
    neighbours: NeighboursOption = None,
    latents: Annotated[Path | None, typer.Option(help="Directory of `cure-ray embed`, if it has moved since training.")] = None,
    encoder: Annotated[Path | None, typer.Option(help="The encoder's directory, if it has moved since `cure-ray embed`.")] = None,
    add: Annotated[bool, typer.Option("--add", help="Allow results of several checkpoints in one --out.")] = False,
    no_vectors: Annotated[bool, typer.Option("--no-vectors", help="Do not keep vectors of sentences for other heads' attacks.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N; of the encoder.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    data_dir: DataDirOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the table.")] = False,
) -> None:
    """Attack the words of sentences that a head on frozen vectors classifies (docs/guide/text.md).

    A sentence is broken if one with words exchanged, tokenized and encoded anew, is misclassified; if none is found that proves nothing.
    Rows of family text go into the same store as certificates, and into the same report. Finished sentences are kept: the same command
    continues where it stopped. All heads named together share every vector; give them at once.

    Example: `cure-ray attack-text runs/max runs/linf --attack pwws,cf8 --neighbours neighbours.json.gz --samples 500 --out results --add`.
    """
    from cure_ray.api.words import WordsRequest, attack_text, summary

    names = tuple(name.strip() for name in attack.split(",") if name.strip())
    asked = WordsRequest(
        tuple(run),
        out,
        names,
        samples,
        budget,
        wordnet,
        neighbours,
        latents,
        encoder,
        add,
        not no_vectors,
        data_dir,
        device,
        threads,
        quiet,
    )
    store = attack_text(asked)
    print(summary(store))
    print(f"verdicts: {store.root}/verdicts")
