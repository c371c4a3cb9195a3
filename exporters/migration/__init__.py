"""From another server's archives to entries of a model repository; nothing in an archive is run.

archive      a .mar, .tar.gz or folder, unpacked with every limit kept
handlers     what its Python files are, by parsing them
settings     config.properties and model-config.yaml
artifact     what the serialized file is, and the signature it declares
entry        one archive → one published version and a report of what was carried over
store        a folder of archives → models with versions
report       the report as table, JSON and Markdown
comparison   recorded requests, sent to the old server and to the gateway
"""
