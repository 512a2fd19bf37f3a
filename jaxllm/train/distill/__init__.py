"""Knowledge distillation: a small student learns from a large teacher.

losses: divergences between distributions, of the whole vocabulary or the top-k tokens, and the
objectives of a step. feature_loss: the loss of hidden states. cached_logits: a teacher's outputs on
disk. on_policy: on-policy rows that the student generates. sequence_kd: texts that the teacher
generates. student_init: random initialization of a student. job: the options, and the training
job.
"""
