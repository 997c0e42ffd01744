"""`make demo`: the main job, end to end on one machine, while machines are taken away.

``storm`` takes them away, ``watcher`` measures what training did meanwhile, ``proof``
checks the weights, ``__main__`` tells the story.
"""
