"""What a weight can be, how it multiplies, in which precision it is kept, and how it is filed."""
