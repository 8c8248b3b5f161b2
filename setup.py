"""Distribution "fairtrain". `configs/` stands at the top of the repository and is installed as `trainer.configs`."""

from setuptools import find_packages, setup

setup(
    name="fairtrain",
    version="0.1.0",
    description="A fairseq-style trainer whose runs continue exactly: kill it anywhere, continue it anywhere.",
    long_description=open("README.md", encoding="utf-8").read() if __import__("os").path.exists("README.md") else "",
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["checkpoint_*", "distributed_utils", "trainer", "trainer.*"]) + ["trainer.configs"],
    package_dir={"trainer.configs": "configs"},
    package_data={"trainer.configs": ["*.yaml", "*/*.yaml"]},
    install_requires=[
        "torch>=2.6",
        "hydra-core>=1.3",
        "omegaconf>=2.3",
        "numpy>=1.24",
        "rich>=13",
        "isal>=1.7",  # CRC-32 of checkpoints at the speed of memory
    ],
    extras_require={
        "digits": ["scikit-learn>=1.3", "pillow>=10"],
        "images": ["pillow>=10"],
        "tensorboard": ["tensorboard>=2.14"],
        "wandb": ["wandb>=0.16"],
        "s3": ["boto3>=1.36", "iopath>=0.1.10"],  # checkpoints in an object store
        "test": [
            "pytest>=8",
            "hypothesis>=6",
            "psutil>=5",
            "safetensors>=0.4",  # reads what we export
            "moto[s3]>=5",  # with the two below, an S3 server
            "flask>=3",
            "flask-cors>=4",
        ],
    },
    entry_points={
        "console_scripts": [
            "fairtrain=trainer.__main__:main",
            "fairtrain-sample=trainer.tasks.sample:main",
            "fairtrain-plot=trainer.plot:main",
            "fairtrain-checkpoint=trainer.tools.checkpoint:main",
            "fairtrain-verify-resume=trainer.tools.verify_resume:main",
            "fairtrain-eval=trainer.tools.eval:command",
        ]
    },
)
