"""`fullshard mine`: reads pairs and a corpus, embeds and searches them, and chooses hard negatives."""
