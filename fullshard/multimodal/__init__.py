"""What families of models with towers share: processors, towers, chat data with media, the loss over tokens and media.

A tower is a part of a model that only some samples need, such as a vision encoder. Must not know any family.
"""
