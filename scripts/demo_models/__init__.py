"""The models in jaxllm/demo: their texts, training and evaluation.

train_demo: training of demo:llama and demo:gpt2 on stories.
train_long: training of four models of equal size on long texts; two are in jaxllm/demo.
demo_data: the demo tokenizer and training rows.
demo_files: writing of a trained model with its README.
long_data: long texts with early facts and late questions.
story_grammar: stories from a grammar; story/ has its shapes and word tables.
story_consistency: the share of a model's stories with consistent names and pronouns.

These commands made the checkpoints (each model's README has its figures; demo:llama took 42 minutes
on one core):

    python scripts/demo_models/train_demo.py --out jaxllm/demo --seed 0
    python scripts/demo_models/story_consistency.py jaxllm/demo/llama jaxllm/demo/gpt2
    python scripts/demo_models/train_long.py --out jaxllm/demo --kinds dense infini

The first command trains on 9.3 million tokens of stories, drawn on the fly: a batch depends only on
the seed and its number, so an interrupted run resumes with the same bits. Weights are stored in
float16: the story models in Hugging Face format, the long ones in our native format.
"""
