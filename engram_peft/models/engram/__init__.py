"""Causal language models with n-gram memories, in the shape of a transformers model."""

from transformers import AutoConfig, AutoModelForCausalLM

from .configuration_engram import EngramLMConfig
from .modeling_engram import EngramForCausalLM, EngramPreTrainedModel


__all__ = ["EngramForCausalLM", "EngramLMConfig", "EngramPreTrainedModel"]

AutoConfig.register(EngramLMConfig.model_type, EngramLMConfig, exist_ok=True)
AutoModelForCausalLM.register(EngramLMConfig, EngramForCausalLM, exist_ok=True)
