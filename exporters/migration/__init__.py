"""Import of other servers' archives into a model repository; no code in an archive is run.

archive                an unpacked .mar, .tar.gz or folder, within limits
handlers               Python files, parsed but not run
torchserve_settings    config.properties and model-config.yaml
artifact               the serialized file and its signature
config_mapping         TorchServe's settings as a Triton configuration
migrate                one archive → one published version and a report
model_store            a folder of archives → models with versions
report                 the report as table, JSON and Markdown
replay                 recorded requests, sent to the old server and to the gateway
"""
