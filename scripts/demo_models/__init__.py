"""The models in jaxllm/demo: their texts, their training, and how they are judged.

train_demo: trains demo:llama and demo:gpt2 on stories.
train_long: trains four models of one size on texts of several windows; two are in jaxllm/demo.
demo_data: the demo's tokenizer, and the rows that a model is trained on.
demo_files: writes a trained model with its README.
long_data: long texts whose facts are set early and asked for late.
story_grammar: tells stories from a grammar; story/ has its shapes and tables.
story_consistency: counts the stories in which a model keeps names and pronouns.

How the checkpoints were made (each model's README has its figures; demo:llama took 42 minutes of
one core):

    python scripts/demo_models/train_demo.py --out jaxllm/demo --seed 0
    python scripts/demo_models/story_consistency.py jaxllm/demo/llama jaxllm/demo/gpt2
    python scripts/demo_models/train_long.py --out jaxllm/demo --kinds dense infini

The first command trains on 9.3 million tokens of stories, which are drawn as they are needed: a
batch depends on the seed and its number alone, so an interrupted run goes on to the same bits.
Weights are stored in float16: the stories' models in Hugging Face's form, the long ones in ours.
"""
