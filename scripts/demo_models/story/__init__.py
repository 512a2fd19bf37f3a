"""Story shapes, and the word tables that fill them.

beats: sentences that all story shapes share.
activities, mysteries, friendship, courage: story shapes by theme.
tables: characters, places, things and events.
"""
