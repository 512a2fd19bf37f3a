"""Knowledge distillation: a small student learns from a large teacher.

losses: divergences between distributions, of the whole vocabulary or the top-k tokens, the distance
of hidden states, and the objectives of a step. teacher: a teacher's outputs on disk. on_policy:
rows that the student generates. sequence_kd: texts that the teacher generates. student: a part of
the teacher. settings: the options. job: the training job. command: `jaxllm train distill`.
"""
