"""Drop-in modules with other libraries' names, shapes and conventions, and plugins for serving engines."""
