"""The functions behind `import penstock` and behind every command: models, files and options in,
typed results out. Nothing here prints, except progress where it is asked for."""
