"""Option names of other libraries, and remedies for options that do not exist here."""

ALIASES = {
    **dict.fromkeys(("stop", "stop_sequences", "stops", "stop_words"), "stop_strings"),
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_gen_len", "n_predict", "num_predict"),
        "max_new_tokens",
    ),
    **dict.fromkeys(("n", "num_samples", "best_of"), "num_return_sequences"),
    **dict.fromkeys(("stop_token_ids", "eos_id", "eos_token", "eos_token_ids"), "eos_token_id"),
    **dict.fromkeys(("repeat_penalty", "rep_pen"), "repetition_penalty"),
    **dict.fromkeys(("logprobs", "top_n_tokens", "n_probs"), "top_logprobs"),
    **dict.fromkeys(("beam_size", "beam_width"), "num_beams"),
    **dict.fromkeys(("past_key_values", "kv_cache", "prompt_cache"), "cache"),
    **dict.fromkeys(("draft_model", "draft"), "assistant_model"),
    **dict.fromkeys(("logits_processors", "processors"), "logits_processor"),
    **dict.fromkeys(("random_seed", "generator", "rng", "key"), "seed"),
    "temp": "temperature",
    "typical": "typical_p",
    "min_tokens": "min_new_tokens",
    "mirostat": "mirostat_tau",
    "cfg_scale": "guidance_scale",
    "prompt_lookup": "prompt_lookup_num_tokens",
    "prefill_step_size": "chunk",
}
HINTS: dict[str, str] = {theirs: f"use {ours}" for theirs, ours in ALIASES.items()} | {
    "max_length": "use max_new_tokens, the length without the prompt",
    "ignore_eos": "use eos_token_id=[]",
    "streamer": "use LM.stream",
    "stream": "use LM.stream",
    "attention_mask": "pass prompts without padding, as a list for a batch",
    "use_cache": "the cache is always used",
    "prefix_allowed_tokens_fn": "compiled steps cannot call Python; write it as a JAX"
    " function of (scores, Context) for logits_processor",
    "diversity_penalty": "diverse beam search is not supported",
    "num_beam_groups": "diverse beam search is not supported",
    "constraints": "constrained beam search is not supported",
    "force_words_ids": "constrained beam search is not supported",
    "generation_config": "pass its fields as options",
}
