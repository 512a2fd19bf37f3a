"""What does a model still know of a long text? A fact at some depth of it, asked for at its end.

texts: the texts, by a seed. stories: the words of those that the demo models understand. reading: a
text piece by piece into a cache of so many slots, and answers against it. grid: depths by lengths,
for any model and policy. report: as a table, as a picture.
"""
