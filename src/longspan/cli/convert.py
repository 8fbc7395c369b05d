"""`longspan import`: a Transformer-XL of another code as one of ours."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longspan.cli.options import DeviceName, DtypeName, Threads, machine
from longspan.errors import ConfigError

if TYPE_CHECKING:
    from longspan.tokens import Tokenizer


def import_model(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A TransfoXL folder, or the authors' state dict.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to make.")],
    tokens: Annotated[
        str,
        typer.Option(
            "--tokens",
            help="bytes, characters (id = code point), VOCAB.txt (id = line number), or the vocab.pkl of transformers.",
        ),
    ],
    config: Annotated[
        Path | None, typer.Option("--config", help="The authors' arguments as JSON, for their state dict.")
    ] = None,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Read a Transformer-XL that `transformers` 4.x or the authors' code saved. Nothing in it is executed."""
    from longspan.checkpoints.convert import import_transfo_xl
    from longspan.checkpoints.model_folder import save_model

    where = machine(device, dtype, threads)
    model = import_transfo_xl(source, config_path=config)
    if dtype != "auto":
        model = model.to(where.dtype)
    tokenizer = tokenizer_for(tokens, model.config.vocabulary)
    if tokenizer.size != model.config.vocabulary:
        raise ConfigError(
            f"--tokens {tokens} has {tokenizer.size} tokens and {source} {model.config.vocabulary}; "
            "give the vocabulary it was trained with, the vocab.pkl of transformers or a VOCAB.txt"
        )
    save_model(out, model, tokenizer, notes=[f"Imported from {source.name}."])
    known = f"{model.config.vocabulary:,} tokens ({tokenizer.kind})"
    print(f"{out}: transformer-xl, {model.parameter_count:,} parameters, {known}")


def tokenizer_for(tokens: str, vocabulary: int | None) -> "Tokenizer":
    """The tokenizer `--tokens` names, held to the number of tokens a model knows.

    A model of bytes may know fewer tokens than 256 (it then refuses texts with the others) or more (it never writes
    those).
    """
    from longspan.checkpoints.pickles import is_pickle
    from longspan.checkpoints.vocabulary import read_vocabulary
    from longspan.tokens import ByteTokenizer, CharacterTokenizer, WordTokenizer

    if tokens == "bytes":
        return ByteTokenizer()
    if tokens == "characters":
        if vocabulary is None or not 0 < vocabulary <= 0xD800:
            raise ConfigError(
                f"--tokens characters needs model.vocabulary between 1 and 55296, and it is {vocabulary}; "
                "the characters are the code points below it"
            )
        return CharacterTokenizer("".join(map(chr, range(vocabulary))))
    path = Path(tokens)
    if not path.is_file():
        raise ConfigError(f"--tokens {tokens!r} is neither bytes nor characters nor a file that is there")
    words = read_vocabulary(path, vocabulary) if is_pickle(path) else WordTokenizer.from_vocabulary(path)
    if vocabulary is not None and words.size != vocabulary:
        raise ConfigError(f"{path} has {words.size} words and the model {vocabulary} tokens; they must agree")
    return words
