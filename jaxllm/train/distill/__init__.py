"""Knowledge distillation: a small student learns from a large teacher.

divergences: forward and reverse KL and Jensen-Shannon of next-token distributions. buckets: the
top-k tokens of a distribution, and the rest. hidden: the loss of hidden states. vocabulary: the
common vocabulary. objectives: the losses of a step. recorded: a teacher's outputs on disk. sampled:
on-policy rows that the student generates. written: texts that the teacher generates. student:
initialization of the student. teachers: students and texts from a teacher. settings: setup from
options. job: the training job.
"""
