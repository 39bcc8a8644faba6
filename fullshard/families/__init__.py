"""Families: one folder for each kind of model that fullshard trains, with everything that only it needs.

Every folder here is a family; `fullshard.config.families` finds it, and also a package that another distribution names
under the entry point group `fullshard.families`. There is no list of families, and no family imports another. A family
may hold:

    models/ objectives/ encoders/ sources/ evaluations/   one file per `kind` of a recipe, named after the kind
    commands/                                             one file per command: `sample.py` defines `fullshard sample`
    recipes/                                              built-in recipes, one YAML file each

All of these are optional, and all other folders and files are the family's own. Two families share code through `hf`,
`text`, `images` and `similarity`.
"""
