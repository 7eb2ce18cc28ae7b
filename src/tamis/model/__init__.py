"""A layer's numbers, as a model's configuration gives them: sizes, rope, the indexer's recipe, absorbed weights."""
