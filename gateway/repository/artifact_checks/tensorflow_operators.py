"""TensorFlow's operators that only compute from tensors, variables and tables.

All others are refused in an untrusted graph: operators that read and write files, call Python, use
queues, datasets, devices or the network, compile or load native code, and any that TensorFlow adds
in future. ``saved_model`` has the rules for checkpoints and vocabularies.
"""

from __future__ import annotations

PURE = frozenset(
    str.split(
        """
        Abs AccumulateNV2 Acos Acosh Add AddN AddV2 AdjustContrast AdjustContrastv2 AdjustHue
        AdjustSaturation All AllCandidateSampler Angle AnonymousHashTable
        AnonymousMutableDenseHashTable AnonymousMutableHashTable
        AnonymousMutableHashTableOfTensors Any ApplyAdaMax ApplyAdadelta ApplyAdagrad
        ApplyAdagradDA ApplyAdagradV2 ApplyAdam ApplyAddSign ApplyCenteredRMSProp ApplyFtrl
        ApplyFtrlV2 ApplyGradientDescent ApplyMomentum ApplyPowerSign ApplyProximalAdagrad
        ApplyProximalGradientDescent ApplyRMSProp ApproxTopK ApproximateEqual ArgMax ArgMin
        AsString Asin Asinh Assert Assign AssignAdd AssignAddVariableOp AssignSub
        AssignSubVariableOp AssignVariableOp Atan Atan2 Atanh AudioSpectrogram AudioSummary
        AudioSummaryV2 AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BandedTriangularSolve
        BatchCholesky BatchCholeskyGrad BatchFFT BatchFFT2D BatchFFT3D BatchIFFT BatchIFFT2D
        BatchIFFT3D BatchMatMul BatchMatMulV2 BatchMatMulV3 BatchMatrixBandPart
        BatchMatrixDeterminant BatchMatrixDiag BatchMatrixDiagPart BatchMatrixInverse
        BatchMatrixSetDiag BatchMatrixSolve BatchMatrixSolveLs BatchMatrixTriangularSolve
        BatchNormWithGlobalNormalization BatchNormWithGlobalNormalizationGrad BatchSelfAdjointEig
        BatchSelfAdjointEigV2 BatchSvd BatchToSpace BatchToSpaceND BesselI0 BesselI0e BesselI1
        BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1
        Betainc BiasAdd BiasAddGrad BiasAddV1 Bincount Bitcast BitwiseAnd BitwiseOr BitwiseXor
        BlockLSTM BlockLSTMGrad BlockLSTMGradV2 BlockLSTMV2 BroadcastArgs BroadcastGradientArgs
        BroadcastTo Bucketize CSRSparseMatrixComponents CSRSparseMatrixToDense
        CSRSparseMatrixToSparseTensor CTCBeamSearchDecoder CTCGreedyDecoder CTCLoss CTCLossV2 Case
        Cast Ceil CheckNumerics CheckNumericsV2 Cholesky CholeskyGrad ClipByValue
        CombinedNonMaxSuppression Complex ComplexAbs ComputeAccidentalHits ComputeBatchSize Concat
        ConcatOffset ConcatV2 Conj ConjugateTranspose Const ControlTrigger Conv Conv2D
        Conv2DBackpropFilter Conv2DBackpropFilterV2 Conv2DBackpropInput Conv2DBackpropInputV2
        Conv3D Conv3DBackpropFilter Conv3DBackpropFilterV2 Conv3DBackpropInput
        Conv3DBackpropInputV2 Copy Cos Cosh CountUpTo CropAndResize CropAndResizeGradBoxes
        CropAndResizeGradImage Cross CudnnRNN CudnnRNNBackprop CudnnRNNBackpropV2
        CudnnRNNBackpropV3 CudnnRNNCanonicalToParams CudnnRNNCanonicalToParamsV2
        CudnnRNNParamsSize CudnnRNNParamsToCanonical CudnnRNNParamsToCanonicalV2 CudnnRNNV2
        CudnnRNNV3 Cumprod Cumsum CumulativeLogsumexp DataFormatDimMap DataFormatVecPermute Dawsn
        DecodeAndCropJpeg DecodeBase64 DecodeBmp DecodeCSV DecodeCompressed DecodeGif DecodeImage
        DecodeJSONExample DecodeJpeg DecodeJxl DecodePaddedRaw DecodePng DecodeRaw DecodeWav
        DecodeWebP DenseBincount DenseCountSparseOutput DenseToCSRSparseMatrix
        DenseToDenseSetOperation DenseToSparseSetOperation DepthToSpace DepthwiseConv2dNative
        DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Dequantize
        DeserializeManySparse DeserializeSparse DestroyResourceOp DestroyTemporaryVariable
        DeviceIndex Diag DiagPart Digamma Dilation2D Dilation2DBackpropFilter
        Dilation2DBackpropInput DisableCopyOnRead Div DivNoNan DrawBoundingBoxes
        DrawBoundingBoxesV2 DummySeedGenerator DynamicPartition DynamicStitch EditDistance Eig
        Einsum Elu EluGrad Empty EmptyTensorList EmptyTensorMap EncodeBase64 EncodeJpeg
        EncodeJpegVariableQuality EncodePng EncodeWav EnsureShape Enter Equal Erf Erfc Erfinv
        EuclideanNorm Exit Exp ExpandDims Expint Expm1 ExtractGlimpse ExtractGlimpseV2
        ExtractImagePatches ExtractJpegShape ExtractVolumePatches FFT FFT2D FFT3D FFTND Fact
        FakeParam FakeQuantWithMinMaxArgs FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVars
        FakeQuantWithMinMaxVarsGradient FakeQuantWithMinMaxVarsPerChannel
        FakeQuantWithMinMaxVarsPerChannelGradient Fill Fingerprint Floor FloorDiv FloorMod For
        FractionalAvgPool FractionalAvgPoolGrad FractionalMaxPool FractionalMaxPoolGrad FresnelCos
        FresnelSin FusedBatchNorm FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3
        FusedBatchNormV2 FusedBatchNormV3 FusedPadConv2D FusedResizeAndPadConv2D GRUBlockCell
        GRUBlockCellGrad Gather GatherNd GatherV2 GenerateBoundingBoxProposals Greater
        GreaterEqual GuaranteeConst HSVToRGB HashTable HashTableV2 HistogramFixedWidth
        HistogramSummary HostConst IFFT IFFT2D IFFT3D IFFTND IRFFT IRFFT2D IRFFT3D IRFFTND
        Identity IdentityN If Igamma IgammaGradA Igammac Imag ImageProjectiveTransformV2
        ImageProjectiveTransformV3 ImageSummary InTopK InTopKV2 InitializeTable InitializeTableV2
        InplaceAdd InplaceSub InplaceUpdate Inv InvGrad Invert InvertPermutation IsFinite IsInf
        IsNan IsResourceHandleRefCounting IsTensorFloat32Enabled IsVariableInitialized
        IsotonicRegression KMC2ChainInitialization KmeansPlusPlusInitialization KthOrderStatistic
        L2Loss LRN LRNGrad LSTMBlockCell LSTMBlockCellGrad LeakyRelu LeakyReluGrad
        LearnedUnigramCandidateSampler LeftShift Less LessEqual Lgamma LinSpace ListDiff Log Log1p
        LogMatrixDeterminant LogSoftmax LogUniformCandidateSampler LogicalAnd LogicalNot LogicalOr
        LookupTableExport LookupTableExportV2 LookupTableFind LookupTableFindV2 LookupTableImport
        LookupTableImportV2 LookupTableInsert LookupTableInsertV2 LookupTableRemoveV2
        LookupTableSize LookupTableSizeV2 LoopCond LowerBound Lu MakeUnique MapDefun MatMul
        MatrixBandPart MatrixDeterminant MatrixDiag MatrixDiagPart MatrixDiagPartV2
        MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixExponential MatrixInverse MatrixLogarithm
        MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 MatrixSolve MatrixSolveLs MatrixSquareRoot
        MatrixTriangularSolve Max MaxPool MaxPool3D MaxPool3DGrad MaxPool3DGradGrad MaxPoolGrad
        MaxPoolGradGrad MaxPoolGradGradV2 MaxPoolGradGradWithArgmax MaxPoolGradV2
        MaxPoolGradWithArgmax MaxPoolV2 MaxPoolWithArgmax Maximum Mean Merge MergeSummary Mfcc Min
        Minimum MirrorPad MirrorPadGrad Mod Mul MulNoNan Multinomial MutableDenseHashTable
        MutableDenseHashTableV2 MutableHashTable MutableHashTableOfTensors
        MutableHashTableOfTensorsV2 MutableHashTableV2 Ndtri NearestNeighbors Neg NextAfter
        NextIteration NoOp NonDeterministicInts NonMaxSuppression NonMaxSuppressionV2
        NonMaxSuppressionV3 NonMaxSuppressionV4 NonMaxSuppressionV5 NonMaxSuppressionWithOverlaps
        NotEqual NthElement OneHot OnesLike OptionalFromValue OptionalGetValue OptionalHasValue
        OptionalNone Pack Pad PadV2 ParallelConcat ParallelDynamicStitch
        ParameterizedTruncatedNormal ParseExample ParseExampleV2 ParseSequenceExample
        ParseSequenceExampleV2 ParseSingleExample ParseSingleSequenceExample ParseTensor
        PartitionedCall Placeholder PlaceholderV2 PlaceholderWithDefault Polygamma PopulationCount
        Pow PreventGradient Prod Qr QuantizeAndDequantize QuantizeAndDequantizeV2
        QuantizeAndDequantizeV3 QuantizeAndDequantizeV4 QuantizeAndDequantizeV4Grad
        QuantizeDownAndShrinkRange QuantizeV2 QuantizedAdd QuantizedAvgPool
        QuantizedBatchNormWithGlobalNormalization QuantizedBiasAdd QuantizedConcat
        QuantizedConcatV2 QuantizedConv2D QuantizedConv2DAndRelu
        QuantizedConv2DAndReluAndRequantize QuantizedConv2DAndRequantize QuantizedConv2DPerChannel
        QuantizedConv2DWithBias QuantizedConv2DWithBiasAndRelu
        QuantizedConv2DWithBiasAndReluAndRequantize QuantizedConv2DWithBiasAndRequantize
        QuantizedConv2DWithBiasSignedSumAndReluAndRequantize QuantizedConv2DWithBiasSumAndRelu
        QuantizedConv2DWithBiasSumAndReluAndRequantize QuantizedDepthwiseConv2D
        QuantizedDepthwiseConv2DWithBias QuantizedDepthwiseConv2DWithBiasAndRelu
        QuantizedDepthwiseConv2DWithBiasAndReluAndRequantize QuantizedInstanceNorm QuantizedMatMul
        QuantizedMatMulWithBias QuantizedMatMulWithBiasAndDequantize
        QuantizedMatMulWithBiasAndRelu QuantizedMatMulWithBiasAndReluAndRequantize
        QuantizedMatMulWithBiasAndRequantize QuantizedMaxPool QuantizedMul QuantizedRelu
        QuantizedRelu6 QuantizedReluX QuantizedReshape QuantizedResizeBilinear RFFT RFFT2D RFFT3D
        RFFTND RGBToHSV RaggedBincount RaggedCountSparseOutput RaggedCross RaggedFillEmptyRows
        RaggedFillEmptyRowsGrad RaggedGather RaggedRange RaggedTensorFromVariant
        RaggedTensorToSparse RaggedTensorToTensor RaggedTensorToVariant
        RaggedTensorToVariantGradient RandomGamma RandomGammaGrad RandomIndexShuffle RandomPoisson
        RandomPoissonV2 RandomShuffle RandomStandardNormal RandomUniform RandomUniformInt Range
        Rank ReadVariableOp Real RealDiv Reciprocal ReciprocalGrad ReduceJoin RefEnter RefExit
        RefIdentity RefMerge RefNextIteration RefSelect RefSwitch RegexFullMatch RegexReplace Relu
        Relu6 Relu6Grad ReluGrad RequantizationRange RequantizationRangePerChannel Requantize
        RequantizePerChannel Reshape ResizeArea ResizeBicubic ResizeBicubicGrad ResizeBilinear
        ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad ResourceApplyAdaMax
        ResourceApplyAdadelta ResourceApplyAdagrad ResourceApplyAdagradDA ResourceApplyAdagradV2
        ResourceApplyAdam ResourceApplyAdamWithAmsgrad ResourceApplyAddSign
        ResourceApplyCenteredRMSProp ResourceApplyFtrl ResourceApplyFtrlV2
        ResourceApplyGradientDescent ResourceApplyKerasMomentum ResourceApplyMomentum
        ResourceApplyPowerSign ResourceApplyProximalAdagrad ResourceApplyProximalGradientDescent
        ResourceApplyRMSProp ResourceCountUpTo ResourceGather ResourceGatherNd ResourceScatterAdd
        ResourceScatterDiv ResourceScatterMax ResourceScatterMin ResourceScatterMul
        ResourceScatterNdAdd ResourceScatterNdMax ResourceScatterNdMin ResourceScatterNdSub
        ResourceScatterNdUpdate ResourceScatterSub ResourceScatterUpdate
        ResourceSparseApplyAdadelta ResourceSparseApplyAdagrad ResourceSparseApplyAdagradDA
        ResourceSparseApplyAdagradV2 ResourceSparseApplyCenteredRMSProp ResourceSparseApplyFtrl
        ResourceSparseApplyFtrlV2 ResourceSparseApplyKerasMomentum ResourceSparseApplyMomentum
        ResourceSparseApplyProximalAdagrad ResourceSparseApplyProximalGradientDescent
        ResourceSparseApplyRMSProp ResourceStridedSliceAssign Reverse ReverseSequence ReverseV2
        RightShift Rint RngReadAndSkip RngSkip Roll Round Rsqrt RsqrtGrad
        SampleDistortedBoundingBox SampleDistortedBoundingBoxV2 ScalarSummary ScaleAndTranslate
        ScaleAndTranslateGrad ScatterAdd ScatterDiv ScatterMax ScatterMin ScatterMul ScatterNd
        ScatterNdAdd ScatterNdMax ScatterNdMin ScatterNdNonAliasingAdd ScatterNdSub
        ScatterNdUpdate ScatterSub ScatterUpdate SegmentMax SegmentMaxV2 SegmentMean SegmentMin
        SegmentMinV2 SegmentProd SegmentProdV2 SegmentSum SegmentSumV2 Select SelectV2
        SelfAdjointEig SelfAdjointEigV2 Selu SeluGrad SerializeManySparse SerializeSparse
        SerializeTensor SetSize Shape ShapeN Sigmoid SigmoidGrad Sign Sin Sinh Size Slice
        SobolSample Softmax SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad Softsign
        SoftsignGrad SpaceToBatch SpaceToBatchND SpaceToDepth SparseAdd SparseAddGrad
        SparseApplyAdadelta SparseApplyAdagrad SparseApplyAdagradDA SparseApplyAdagradV2
        SparseApplyCenteredRMSProp SparseApplyFtrl SparseApplyFtrlV2 SparseApplyMomentum
        SparseApplyProximalAdagrad SparseApplyProximalGradientDescent SparseApplyRMSProp
        SparseBincount SparseConcat SparseCountSparseOutput SparseCross SparseCrossHashed
        SparseCrossV2 SparseDenseCwiseAdd SparseDenseCwiseDiv SparseDenseCwiseMul
        SparseFillEmptyRows SparseFillEmptyRowsGrad SparseMatMul SparseMatrixAdd
        SparseMatrixMatMul SparseMatrixMul SparseMatrixNNZ SparseMatrixOrderingAMD
        SparseMatrixSoftmax SparseMatrixSoftmaxGrad SparseMatrixSparseCholesky
        SparseMatrixSparseMatMul SparseMatrixTranspose SparseMatrixZeros SparseReduceMax
        SparseReduceMaxSparse SparseReduceSum SparseReduceSumSparse SparseReorder SparseReshape
        SparseSegmentMean SparseSegmentMeanGrad SparseSegmentMeanGradV2
        SparseSegmentMeanWithNumSegments SparseSegmentSqrtN SparseSegmentSqrtNGrad
        SparseSegmentSqrtNGradV2 SparseSegmentSqrtNWithNumSegments SparseSegmentSum
        SparseSegmentSumGrad SparseSegmentSumGradV2 SparseSegmentSumWithNumSegments SparseSlice
        SparseSliceGrad SparseSoftmax SparseSoftmaxCrossEntropyWithLogits SparseSparseMaximum
        SparseSparseMinimum SparseSplit SparseTensorDenseAdd SparseTensorDenseMatMul
        SparseTensorToCSRSparseMatrix SparseToDense SparseToSparseSetOperation Spence Split SplitV
        Sqrt SqrtGrad Square SquaredDifference Squeeze Stack StackClose StackCloseV2 StackPop
        StackPopV2 StackPush StackPushV2 StackV2 StatefulPartitionedCall StatefulRandomBinomial
        StatefulStandardNormal StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform
        StatefulUniformFullInt StatefulUniformInt StatelessCase StatelessIf StatelessMultinomial
        StatelessParameterizedTruncatedNormal StatelessRandomBinomial StatelessRandomGammaV2
        StatelessRandomGammaV3 StatelessRandomGetAlg StatelessRandomGetKeyCounter
        StatelessRandomGetKeyCounterAlg StatelessRandomNormal StatelessRandomNormalV2
        StatelessRandomPoisson StatelessRandomUniform StatelessRandomUniformFullInt
        StatelessRandomUniformFullIntV2 StatelessRandomUniformInt StatelessRandomUniformIntV2
        StatelessRandomUniformV2 StatelessSampleDistortedBoundingBox StatelessShuffle
        StatelessTruncatedNormal StatelessTruncatedNormalV2 StatelessWhile StaticRegexFullMatch
        StaticRegexReplace StochasticCastToInt StopGradient StridedSlice StridedSliceAssign
        StridedSliceGrad StringFormat StringJoin StringLength StringLower StringNGrams StringSplit
        StringSplitV2 StringStrip StringToHashBucket StringToHashBucketFast
        StringToHashBucketStrong StringToNumber StringUpper Sub Substr Sum Svd Switch
        SymbolicGradient Tan Tanh TanhGrad TemporaryVariable TensorArray TensorArrayClose
        TensorArrayCloseV2 TensorArrayCloseV3 TensorArrayConcat TensorArrayConcatV2
        TensorArrayConcatV3 TensorArrayGather TensorArrayGatherV2 TensorArrayGatherV3
        TensorArrayGrad TensorArrayGradV2 TensorArrayGradV3 TensorArrayGradWithShape
        TensorArrayPack TensorArrayRead TensorArrayReadV2 TensorArrayReadV3 TensorArrayScatter
        TensorArrayScatterV2 TensorArrayScatterV3 TensorArraySize TensorArraySizeV2
        TensorArraySizeV3 TensorArraySplit TensorArraySplitV2 TensorArraySplitV3 TensorArrayUnpack
        TensorArrayV2 TensorArrayV3 TensorArrayWrite TensorArrayWriteV2 TensorArrayWriteV3
        TensorListConcat TensorListConcatLists TensorListConcatV2 TensorListElementShape
        TensorListFromTensor TensorListGather TensorListGetItem TensorListLength TensorListPopBack
        TensorListPushBack TensorListPushBackBatch TensorListReserve TensorListResize
        TensorListScatter TensorListScatterIntoExistingList TensorListScatterV2 TensorListSetItem
        TensorListSplit TensorListStack TensorMapErase TensorMapHasKey TensorMapInsert
        TensorMapLookup TensorMapSize TensorMapStackKeys TensorScatterAdd TensorScatterMax
        TensorScatterMin TensorScatterSub TensorScatterUpdate TensorStridedSliceUpdate
        TensorSummary TensorSummaryV2 ThreadUnsafeUnigramCandidateSampler Tile TileGrad ToBool
        TopK TopKUnique TopKV2 TopKWithUnique Transpose TridiagonalMatMul TridiagonalSolve
        TruncateDiv TruncateMod TruncatedNormal UnicodeDecode UnicodeDecodeWithOffsets
        UnicodeEncode UnicodeScript UnicodeTranscode UniformCandidateSampler UniformDequantize
        UniformQuantize UniformQuantizedAdd UniformQuantizedClipByValue
        UniformQuantizedConvolution UniformQuantizedConvolutionHybrid UniformQuantizedDot
        UniformQuantizedDotHybrid UniformRequantize Unique UniqueV2 UniqueWithCounts
        UniqueWithCountsV2 Unpack UnravelIndex UnsortedSegmentJoin UnsortedSegmentMax
        UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum UpperBound VarHandleOp
        VarIsInitializedOp Variable VariableShape VariableV2 Where While WindowOp Xdivy Xlog1py
        Xlogy ZerosLike Zeta _Arg _Retval
        """
    )
)
