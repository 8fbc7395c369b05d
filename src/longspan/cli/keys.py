"""The keys of a model's config, with what they mean: the text of `longspan init --help`. A test freezes the list."""

MODEL_KEYS = {
    "vocabulary": "number of tokens; 256 for bytes",
    "layers": "number of layers",
    "width": "width of the hidden states",
    "heads": "attention heads",
    "head_width": "width of a head; width / heads unless given",
    "inner": "width inside the feed-forward layer, 4 x width unless given; of recurrent layers below the last, width",
    "segment": "tokens read at once",
    "memory": "hidden states remembered per layer (transformer-xl, rotary)",
    "clamp": "distances beyond this one look alike; 0 is off (transformer-xl)",
    "same_length": "every query sees `memory` keys, itself included (transformer-xl, rotary)",
    "position": "relative | shaw (transformer-xl); sinusoid | learned | shaw (vanilla)",
    "max_distance": "last distance (shaw) or place (learned) with a vector of its own; from segment unless given",
    "shared_biases": "one pair u, w for all layers, not one per layer (transformer-xl)",
    "norm": "post (as published) | pre",
    "norm_type": "layer | rms",
    "final_norm": "a norm after the last layer",
    "activation": "relu | gelu | squared-relu | swiglu",
    "biases": "biases in the feed-forward layers",
    "dropout": "of embeddings, positions, attention outputs and feed-forward; of the last output (awd-lstm)",
    "attention_dropout": "of attention weights",
    "input_dropout": "of the embedding's units, the same at every position (awd-lstm)",
    "hidden_dropout": "of units between layers, the same at every position (awd-lstm)",
    "embedding_dropout": "of words, wherever they stand (awd-lstm)",
    "weight_dropout": "of the matrices from hidden state to hidden state (awd-lstm)",
    "zoneout": "of the cell's updates (qrnn)",
    "ar": "activation regularisation: weight of the last output's squares (awd-lstm)",
    "tar": "temporal activation regularisation: weight of the squares of its steps (awd-lstm)",
    "window": "positions the gates see: 1 or 2 (qrnn)",
    "embedding_width": "width of the token embedding; width unless given",
    "cutoffs": "ids at which rarer clusters begin, for example [20000,40000,200000]",
    "div_val": "each rarer cluster's embedding is this many times narrower",
    "tie_embedding": "one table for embedding and softmax",
    "tie_projections": "one projection for embedding and softmax of each rarer cluster",
}


def keys_help() -> str:
    lines = "\n".join(f"  model.{name:<18} {meaning}" for name, meaning in MODEL_KEYS.items())
    return f"Keys for --set:\n\n\b\n{lines}"
