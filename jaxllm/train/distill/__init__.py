"""Knowledge distillation: a small student learns from a large teacher.

divergences: forward and reverse KL and Jensen-Shannon of next-token distributions. topk_logits: the
top-k tokens of a distribution, and the rest. feature_loss: the loss of hidden states. vocabulary:
the common vocabulary. objectives: the losses of a step. cached_logits: a teacher's outputs on disk.
on_policy: on-policy rows that the student generates. sequence_kd: texts that the teacher generates.
student_init: initialization of the student. teachers: students and texts from a teacher.
settings: setup from options. job: the training job.
"""
