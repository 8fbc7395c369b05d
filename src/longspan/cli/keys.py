"""The keys of a model's config, with what they mean: the text of `longspan init --help`. A test freezes the list."""

MODEL_KEYS = {
    "vocabulary": "number of tokens; 256 for bytes",
    "layers": "number of layers",
    "width": "width of the hidden states",
    "heads": "attention heads",
    "head_width": "width of a head; width / heads unless given",
    "inner": "width inside the feed-forward layer; 4 x width unless given",
    "segment": "tokens read at once",
    "memory": "positions remembered per layer (transformer-xl, longformer)",
    "clamp": "distances beyond this one look alike; 0 is off (transformer-xl)",
    "same_length": "every query sees `memory` keys, itself included (transformer-xl)",
    "position": "relative | shaw (transformer-xl); sinusoid | learned | shaw (vanilla)",
    "max_distance": "last distance (shaw) or place (learned) with a vector of its own; from segment unless given",
    "shared_biases": "one pair u, w for all layers, not one per layer (transformer-xl)",
    "pattern": "strided | fixed (sparse)",
    "factorised": "the two patterns over heads | layers, or merged in every head (sparse)",
    "stride": "length of the local pattern and step of the distant one (sparse)",
    "summary": "summary positions per stride of the fixed pattern (sparse)",
    "window": "keys a query sees, itself included: one number, or a list of one per layer (longformer)",
    "dilation": "gap between the keys of a window: one number, or [[one per head], ... per layer] (longformer)",
    "global_tokens": "first tokens of a document that see all and that all see (longformer)",
    "block": "places per block (bigbird)",
    "window_blocks": "blocks of the window, the own included (bigbird)",
    "random_blocks": "random blocks each block sees (bigbird)",
    "global_blocks": "first blocks of a document that see all and that all see (bigbird)",
    "causal": "nothing later is seen; false reads both ways, for encoding (longformer, bigbird)",
    "norm": "post (as published) | pre",
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
