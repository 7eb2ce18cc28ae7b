"""A tiny model that is trained through tamis: the task, the stages of its training, and measures of what it learned.

`tamis train-demo` runs all of it in minutes on a CPU. The folder `recall` holds its result, a checkpoint that
`tamis generate` and `tamis inspect` use unless they are told otherwise. Needs Hugging Face transformers.
"""
