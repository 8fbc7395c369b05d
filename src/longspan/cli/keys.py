"""The keys of a model's config, with what they mean: the text of `longspan init --help`. A test freezes the list."""

MODEL_KEYS = {
    "vocabulary": "number of tokens; 256 for bytes",
    "layers": "number of layers",
    "width": "width of the hidden states",
    "heads": "attention heads",
    "head_width": "width of a head; width / heads unless given",
    "inner": "width inside the feed-forward layer; 4 x width unless given",
    "segment": "tokens read at once",
    "memory": "hidden states remembered per layer (transformer-xl)",
    "clamp": "distances beyond this one look alike; 0 is off (transformer-xl)",
    "same_length": "every query sees `memory` keys, itself included (transformer-xl)",
    "position": "relative | shaw (transformer-xl); sinusoid | learned | shaw (vanilla)",
    "max_distance": "last distance (shaw) or place (learned) with a vector of its own; from segment unless given",
    "layer_losses": "while training every layer predicts, layer l of n until l/2n of the run is over (vanilla)",
    "targets": "tokens ahead that are predicted while training (vanilla)",
    "shared_biases": "one pair u, w for all layers, not one per layer (transformer-xl)",
    "rounds": "rounds of hashing (reformer)",
    "chunk": "keys of its bucket a query sees in a round, at most (reformer)",
    "buckets": "of a round of hashing, a power of two; 2 x segment / chunk unless given (reformer)",
    "pieces": "the feed-forward layer takes a segment in this many (reformer)",
    "norm": "post (as published) | pre; a reformer has pre alone",
    "final_norm": "a norm after the last layer",
    "activation": "relu | gelu | squared-relu",
    "dropout": "of embeddings, positions, attention outputs and feed-forward",
    "attention_dropout": "of attention weights",
    "embedding_width": "width of the token embedding; width unless given",
    "cutoffs": "ids at which rarer clusters begin, for example [20000,40000,200000]",
    "div_val": "each rarer cluster's embedding is this many times narrower",
    "tie_embedding": "one table for embedding and softmax",
    "tie_projections": "one projection for embedding and softmax of each rarer cluster",
}


def keys_help() -> str:
    lines = "\n".join(f"  model.{name:<18} {meaning}" for name, meaning in MODEL_KEYS.items())
    return f"Keys for --set:\n\n\b\n{lines}"
