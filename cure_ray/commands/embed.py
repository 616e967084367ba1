"""`cure-ray embed`: sentences as vectors of a frozen encoder, a data set that heads are trained and certified on."""

from pathlib import Path
from typing import Annotated

import typer

from cure_ray.commands.train import DataDirOption

WordnetOption = Annotated[Path | None, typer.Option(help="WordNet's files (pwws); default: WNSEARCHDIR, else where packages put them.")]
NeighboursOption = Annotated[Path | None, typer.Option(help='Neighbours of words (cf8): JSON like {"movie": ["film"]}, perhaps .gz.')]


def embed(
    data: Annotated[str, typer.Argument(help="sst2 (in SST-2/ below a data directory), or a folder with train.tsv and dev.tsv.")],
    encoder: Annotated[Path, typer.Option(help="A local transformers directory: BERT and its kin, with its tokenizer.")],
    out: Annotated[Path, typer.Option(help="Directory of the vectors.")],
    pooling: Annotated[str, typer.Option(help="mean (of the last layer, over tokens) or cls (its first token).")] = "mean",
    tune: Annotated[int, typer.Option(min=0, help="Fine-tune the encoder on so many training sentences first; 0: take it as it is.")] = 0,
    tune_epochs: Annotated[int, typer.Option(min=1, help="Epochs of fine-tuning.")] = 2,
    train: Annotated[int | None, typer.Option(min=2, help="Training sentences to embed, of a fixed shuffle; default: all.")] = None,
    augment: Annotated[
        str, typer.Option(help="Also write augmented.npz: training sentences with words of these lists, e.g. pwws,cf8.")
    ] = "",
    copies: Annotated[int, typer.Option(min=1, help="Substituted sentences per training sentence in augmented.npz.")] = 1,
    wordnet: WordnetOption = None,
    neighbours: NeighboursOption = None,
    seed: Annotated[int, typer.Option(help="Seed of fine-tuning, shuffles and substitutions.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    data_dir: DataDirOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the result.")] = False,
) -> None:
    """Turn sentences into vectors of a frozen encoder (docs/guide/text.md). Needs `pip install 'cure-ray[text]'`.

    OUT/latents.npz is a data set: `cure-ray train EXPERIMENT --set dataset.path=OUT/latents.npz`. Its domain is the whole space, and what
    is certified on it is the head in latent space, never a statement about words; those are attacked by `cure-ray attack-text`. Encoded
    sentences are kept: the same command continues where it stopped.

    Example: `cure-ray embed sst2 --encoder minilm/ --tune 4000 --train 12000 --out latents`.
    """
    from cure_ray.api.embed import EmbedRequest
    from cure_ray.api.embed import embed as embed_all

    lists = tuple(name.strip() for name in augment.split(",") if name.strip())
    asked = EmbedRequest(
        data, encoder, out, pooling, tune, tune_epochs, train, lists, copies, wordnet, neighbours, data_dir, seed, device, threads, quiet
    )
    info = embed_all(asked)
    print(f"embedded {info.train} training and {info.test} test sentences in {info.width} dimensions (encoder {info.encoder_digest[:12]})")
    print(f"data set: {out}/latents.npz" + (f"; with substituted sentences: {out}/augmented.npz" if info.augmented else ""))
