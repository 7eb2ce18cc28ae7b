"""The parameters of a layer, as a model's configuration gives them: sizes, rope, index recipe, absorbed weights."""
