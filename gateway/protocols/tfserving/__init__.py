"""TensorFlow Serving's REST and gRPC APIs."""

PREDICTION_SERVICE = "tensorflow.serving.PredictionService"
MODEL_SERVICE = "tensorflow.serving.ModelService"
