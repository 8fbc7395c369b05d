"""LongspanForCausalLM: every family as a model of `transformers` 5."""

from typing import Any, cast

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from longspan.checkpoints.weights import weights_of
from longspan.contract import LanguageModel, State
from longspan.errors import ConfigError, StateError
from longspan.interop.hf.cache import SplitState, StateCache
from longspan.interop.hf.config import LongspanConfig
from longspan.interop.hf.reading import IGNORED, Inputs, Outputs, read_padded, token_losses
from longspan.shapes import Bool, Float, Int, Tensor


class LongspanForCausalLM(PreTrainedModel, GenerationMixin):
    """A longspan model in `self.model`. Logits and losses equal those of longspan.

    A text that is longer than a segment is read segment by segment with the state carried over. In evaluation mode, a
    family without memory is read with a sliding window.
    """

    config_class = LongspanConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    accepts_loss_kwargs = False  # the loss is a mean over tokens
    _is_stateful = True  # a state cannot be cropped, so `generate` refuses assistant models

    def __init__(self, config: LongspanConfig, model: LanguageModel | None = None) -> None:
        """`model` is an existing model of this config; without one, weights are new."""
        super().__init__(config)
        self.model = config.build() if model is None else model
        self._tied_weights_keys = _tied_names(self)
        self.post_init()

    @classmethod
    def of(cls, model: LanguageModel, **settings: Any) -> "LongspanForCausalLM":
        """An existing model; the weights are shared. `settings` are keys of the LongspanConfig."""
        return cls(LongspanConfig.of(model, **settings), model).train(model.training)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: a family initialises its own weights."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:  # noqa: ARG002
        return dict(self._tied_weights_keys or {})

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> torch.nn.Module:
        return cast(torch.nn.Module, self.model.embedding)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ConfigError(
                f"the vocabulary of a longspan model is fixed at {self.config.vocab_size} tokens and cannot become "
                f"{new_num_tokens}; a padding token needs no embedding, because padding is never read"
            )
        return self.get_input_embeddings()

    def prepare_inputs_for_generation(  # type: ignore[override]  # all arguments are passed by name
        self,
        input_ids: Tensor,
        past_key_values: StateCache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 1,
        **kwargs: Any,  # noqa: ARG002 (positions follow from the state)
    ) -> dict[str, Any]:
        """The columns that the cache has not seen."""
        seen = 0 if past_key_values is None else past_key_values.seen
        if seen >= input_ids.shape[1]:
            raise StateError(
                f"the cache has seen {seen} tokens and input_ids has {input_ids.shape[1]}; pass the complete text, "
                "with at least one token more"
            )
        return {
            "input_ids": input_ids[:, seen:],
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
        }

    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Int[Tensor, "B T"] | None = None,
        targets: Int[Tensor, "B T"] | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 0,
        progress: float = 0.0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """The logits of `input_ids`, the loss if `labels` or `targets` are given, and the cache.

        `labels` are those of `transformers`: equal to the input, -100 without a loss. They have no target for the last
        token. `targets` are the next tokens, one for each token, as training with memory needs them. In training mode
        with either, logits are left out, and with complete `targets` the loss is the training loss of the family.
        `starts` marks tokens that begin a document. `past_key_values` is updated in place.
        """
        tokens = _check_inputs(input_ids, labels, targets, past_key_values, kwargs)
        targets = _shifted(labels) if labels is not None else targets
        padding, tokens = _padding(tokens, attention_mask)
        if targets is not None and bool(padding.any()):
            column = torch.arange(tokens.shape[1], device=tokens.device)
            targets = targets.masked_fill(column < padding[:, None], IGNORED)  # the first token has no context
        state = None if past_key_values is None else past_key_values.state
        inputs = Inputs(tokens, starts, None, logits_to_keep, bool(output_hidden_states))
        loss: Tensor | None = None
        if targets is None:
            found = read_padded(self.model, inputs, padding, state)
        elif not self.training:
            found = read_padded(self.model, Inputs(tokens, starts, hidden=inputs.hidden), padding, state)
            assert found.logits is not None
            loss = _mean(token_losses(found.logits, targets), targets)
        elif isinstance(state, SplitState) or bool((targets == IGNORED).any()) or bool(padding.any()):
            found = read_padded(self.model, Inputs(tokens, starts, targets, hidden=inputs.hidden), padding, state)
            assert found.losses is not None
            loss = _mean(found.losses, targets)
        else:
            loss, found = self._training_loss(tokens, targets, state, starts, progress)
        cache: Any = self._update(past_key_values, found.state, tokens.shape[1], use_cache)
        output = CausalLMOutputWithPast(
            loss=loss, logits=found.logits, past_key_values=cache, hidden_states=found.hidden
        )
        return output.to_tuple() if return_dict is False else output

    def _training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None,
        starts: Bool[Tensor, "B T"] | None,
        progress: float,
    ) -> tuple[Float[Tensor, ""], Outputs]:
        """What longspan's own training minimises: the mean loss and the family's further terms."""
        state = self.model.initial_state(len(tokens)) if state is None else state
        total, size = tokens.shape[1], state.reading.segment
        losses = []
        for begin in range(0, total, size):
            part = slice(begin, begin + size)
            marks = None if starts is None else starts[:, part]
            loss, state = self.model.training_loss(tokens[:, part], targets[:, part], state, progress, marks)
            losses.append(loss * (tokens[:, part].shape[1] / total))
        return torch.stack(losses).sum(), Outputs(state.detach())

    def _update(
        self, cache: StateCache | None, state: State | SplitState, columns: int, use_cache: bool | None
    ) -> StateCache | None:
        """The given cache with the new state, or a new one if it is wanted."""
        if cache is not None:
            cache.state, cache.seen = state, cache.seen + columns
            return cache
        wanted = self.config.use_cache if use_cache is None else use_cache
        return StateCache(state, columns) if wanted else None


def _tied_names(model: torch.nn.Module) -> dict[str, str]:
    """The other names of every tied tensor, each with its first name."""
    first = {id(tensor): name for name, tensor in weights_of(model).items()}
    every = model.state_dict(keep_vars=True).items()
    return {name: first[id(tensor)] for name, tensor in every if first[id(tensor)] != name}


def _check_inputs(
    input_ids: Tensor | None,
    labels: Tensor | None,
    targets: Tensor | None,
    cache: Any,
    others: dict[str, Any],
) -> Tensor:
    if input_ids is None or others.get("inputs_embeds") is not None:
        raise ConfigError("a longspan model reads input_ids; inputs_embeds is not supported")
    if labels is not None and targets is not None:
        raise ConfigError(
            "labels and targets are both given; labels are shifted and targets are not, so pass only one of them"
        )
    if cache is not None and not isinstance(cache, StateCache):
        raise ConfigError(
            f"past_key_values is a {type(cache).__name__}; a longspan model needs a StateCache, such as the "
            "one in its output"
        )
    return input_ids


def _shifted(labels: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The label of the next token at every position; the last has none."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)


def _padding(tokens: Int[Tensor, "B T"], mask: Tensor | None) -> tuple[Int[Tensor, "B"], Int[Tensor, "B T"]]:
    """The padding columns at the left of every row, and the tokens with 0 for masked ones. A padding token may be
    outside the vocabulary. At the right it is read, but nothing depends on it."""
    if mask is None or mask.dim() != 2:
        return tokens.new_zeros(len(tokens)), tokens
    visible = mask[:, -tokens.shape[1] :].bool()
    return (visible.cumsum(1) == 0).sum(1), tokens.masked_fill(~visible, 0)


def _mean(losses: Float[Tensor, "B T"], targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    return losses.sum() / (targets != IGNORED).sum()
